"""What a rule is handed: one equation, and all that it takes to run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp._emit import Emitter, bind
from jamp._values import Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Interpreter


class Site(NamedTuple):
    """An equation about to run.

    Attributes:
      interpreter: runs inner programs.
      eqn: the equation as traced.
      operands: its operands, in whatever dtypes they have by now.
      context: what holds around it.
      emitter: makes its casts and notes them in its record.
    """

    interpreter: Interpreter
    eqn: JaxprEqn
    operands: Sequence[Value]
    context: Context
    emitter: Emitter

    @property
    def arrays(self) -> list[Any]:
        """The operands' arrays in those dtypes."""
        return [value.array for value in self.operands]

    def bind(self, arrays: Sequence[Any], **params: Any) -> list[Any]:
        """Binds the equation's primitive; see `jamp._emit.bind`."""
        return bind(self.eqn, arrays, **params)

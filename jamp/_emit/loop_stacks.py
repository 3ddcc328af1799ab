"""What an iteration of a loop computes, and the dtype in which the loop stacks it.

A loop stacks what its iterations give and, for the backward pass, what they save. On
CPUs XLA of JAX 0.10, up to 0.11.1, converts the whole of a stack of bfloat16 to put one
more on it: a loop takes time with the square of its length. There, what is stacked is
float32.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jamp import _primitives
from jamp._dtypes import BFLOAT16, FLOAT32
from jamp._emit.conversions import convert, convert_all
from jamp._lowerings.hook import has_own_product
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32
from jamp._plan.plan import Action, Bind, Cast, Float32Call, Structural
from jamp._plan.values import Value

# Elementwise, and their derivatives need what they take or give.
_SAVED = (_primitives.TRANSCENDENTAL | _primitives.ARITHMETIC) - _primitives.LINEAR


def stacks_in_float32(action: Structural) -> bool:
    """Whether a loop's stacks are float32."""
    return MOVES_BFLOAT16_AS_FLOAT32 and action.device_type == "cpu"


def stackable(arrays: Sequence[Any]) -> list[Any]:
    """Arrays in the dtypes in which such a loop stacks them."""
    dtypes = [jax.typeof(array).dtype for array in arrays]
    return convert_all(arrays, [FLOAT32 if d == BFLOAT16 else d for d in dtypes])


class Iteration:
    """Values of a program in a loop, some of which vary from iteration to iteration."""

    def __init__(self, varying: Iterable[Value]):
        self._varying = {value.number for value in varying}
        # Of varying 16-bit values, by number, the float32 that holds the same.
        self._wide: dict[int, Any] = {}

    def varying(self, action: Action) -> list[int]:
        """The places of those of an action's operands that vary."""
        if not self._varying:
            return []
        return [p for p, v in enumerate(action.operands) if v.number in self._varying]

    def saved(
        self, action: Action, arrays: Sequence[Any], varying: Collection[int]
    ) -> list[Any]:
        """What an action takes, in float32 where the backward pass needs it."""
        taken = list(arrays)
        for place in _needed(action, varying):
            taken[place] = self._in_float32(action.operands[place], arrays[place])
        if isinstance(action, Bind):
            weights = arrays[len(action.eqn.invars) :]
            for place, weight in zip(action.weights, weights, strict=True):
                if place in varying and action.operands[place].dtype == BFLOAT16:
                    taken[place] = weight
        return taken

    def made(self, action: Action, arrays: Sequence[Any]) -> list[Any]:
        """What an action gives, all of which varies."""
        self._varying.update(value.number for value in action.results)
        if isinstance(action, Cast) and action.dtype == FLOAT32:
            self._wide[action.operands[0].number] = arrays[0]
        return convert_all(arrays, [v.dtype if v.low else None for v in action.results])

    def _in_float32(self, value: Value, array: Any) -> Any:
        if value.dtype != BFLOAT16 or jax.typeof(array).dtype == FLOAT32:
            return array
        if value.array is not None:
            return np.asarray(array).astype(FLOAT32)[()]
        if value.number not in self._wide:
            self._wide[value.number] = convert(array, FLOAT32)
        return self._wide[value.number]


def _needed(action: Action, varying: Collection[int]) -> Collection[int]:
    """Which operands the backward pass of an action needs, by their places."""
    name = action.eqn.primitive.name if isinstance(action, Bind) else ""
    match action:
        case Float32Call() | Structural(kind="remat2"):
            return varying
        case Bind(operand_dtypes=None):
            return ()
        case Bind(operand_dtypes=tuple() as dtypes) if has_own_product(name, dtypes):
            return varying
        case Bind() if name in _SAVED:
            return range(len(action.operands))  # They agree in dtype.
    return ()

"""All equations of a program, those of the programs that they hold included."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params


def equations(
    program: Any, enter: Callable[[JaxprEqn], bool] = lambda eqn: True
) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, closed or not, each followed by those that it holds.

    `enter` says of an equation whether to look into the programs that it holds.
    """
    return nested(program.eqns, enter)


def nested(
    eqns: Iterable[JaxprEqn], enter: Callable[[JaxprEqn], bool] = lambda eqn: True
) -> Iterator[JaxprEqn]:
    """Some equations, each followed by those that it holds; see `equations`."""
    for eqn in eqns:
        yield eqn
        if enter(eqn):
            for inner in jaxprs_in_params(eqn.params):
                yield from nested(inner.eqns, enter)


def holds_program(eqn: JaxprEqn) -> bool:
    """Whether an equation holds any program."""
    return any(True for _ in jaxprs_in_params(eqn.params))

"""Primitives of jamp's own that are named like one of JAX's, and differ on CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

Operation = Callable[..., Any]


def like(known: Primitive, abstract_eval: Operation) -> Primitive:
    """A primitive with the name of one of JAX's, and without other rules than this."""
    primitive = Primitive(known.name)
    primitive.multiple_results = known.multiple_results
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    return primitive


def lower(primitive: Primitive, run: Operation, run_on_cpu: Operation) -> None:
    """Registers what a primitive is, in JAX's operations."""
    for rule, platform in ((run, None), (run_on_cpu, "cpu")):
        lowered = mlir.lower_fun(rule, multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, lowered, platform=platform)

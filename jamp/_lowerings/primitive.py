"""Primitives of jamp's own that are named like one of JAX's, and differ on CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

Operation = Callable[..., Any]


def like(
    known: Primitive, abstract_eval: Operation, run: Operation, run_on_cpu: Operation
) -> Primitive:
    """A primitive with the name of one of JAX's, without rules for transformations."""
    primitive = Primitive(known.name)
    primitive.multiple_results = known.multiple_results
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    for rule, platform in ((run, None), (run_on_cpu, "cpu")):
        lowered = mlir.lower_fun(rule, multiple_results=known.multiple_results)
        mlir.register_lowering(primitive, lowered, platform=platform)
    return primitive

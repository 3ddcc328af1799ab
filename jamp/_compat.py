"""The only importer of jax._src: what no public name of JAX gives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax

# No public name gives the settings (x64, mesh, matmul precision ...) that a trace
# depends on and that jax.jit itself keys its caches on.
from jax._src.config import trace_context as _trace_context

# The top-level trace has no public name; jax.core.trace_state_clean is gone.
from jax._src.core import trace_state_clean as _trace_state_clean

# What JAX raises where a custom_vjp function is differentiated with respect to what it
# closes over has no public name.
from jax._src.interpreters.ad import CustomVJPException as CustomVJPException

# No public name lists the primitives of the installed JAX; those that can be lowered
# are the ones that a policy may name.
from jax._src.interpreters.mlir import _lowerings, _platform_specific_lowerings
from jax.extend.core import Primitive

# Primitives that the shared tables may name and that the installed JAX need not know:
# each is of another supported release, or dissolves before lowering.
_NAMEABLE = frozenset(
    {
        "call",
        "call_hi_primitive",
        "closed_call",
        "eval_jaxpr",
        "log2",
        "one_minus_square",
        "polynomial",
    }
)


def trace_context() -> Hashable:
    """The configuration that a traced program depends on."""
    context: Hashable = _trace_context()
    return context


def under_trace(arrays: Iterable[Any]) -> bool:
    """Whether a JAX transformation is tracing at this moment, or made these arrays."""
    return not _trace_state_clean() or any(
        isinstance(array, jax.core.Tracer) for array in arrays
    )


def primitive_names() -> frozenset[str]:
    """Names of all primitives that a supported release of JAX knows how to lower."""
    known: set[Primitive] = set(_lowerings)
    for rules in _platform_specific_lowerings.values():
        known.update(rules)
    return frozenset(primitive.name for primitive in known) | _NAMEABLE


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan equation takes."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12 describes its operands as a tree of constants, carry and slices.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def inlined(fn: Any) -> bool:
    """Whether a function is jitted with `inline=True`."""
    # No public attribute of a jitted function tells how it was jitted. What is inlined
    # leaves no frame of the function in the equations that it emits.
    info = getattr(fn, "_jit_info", None)
    # JAX 0.12 has an enumeration where 0.10 has a bool.
    inline = getattr(info, "inline", False)
    return getattr(inline, "name", inline) in (True, "JAX_EARLY")


# What jax.jit takes to leave nothing but the equations of the function behind. Since
# JAX 0.12 `inline=True` inlines later, when a program is lowered.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

"""What can be told of a program without running it: saved residuals, casts, memory."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import flax
import jax
import optax

import jamp
from jamp._equations.walks import equations
from jamp._explain.residuals import Residual, bytes_by_dtype, find_residuals

TRANSFORMS = tuple(str(Path(module.__file__).parent) for module in (jax, jamp))
LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (flax, optax))


def saved_for_backward(fn: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """The buffers that differentiating `fn` at its first argument saves.

    Args:
      fn: a function that returns a pair of a scalar and something else.
      *args: its arguments, arrays or their shapes.
    """
    return find_residuals(lambda *args: fn(*args)[0], *args)


def bytes_saved(saved: Iterable[Residual]) -> dict[str, int]:
    """Bytes of saved residuals, by dtype and in total."""
    by_dtype = bytes_by_dtype(saved)
    return {**by_dtype, "total": sum(by_dtype.values())}


def lines(eqn: Any) -> tuple[str, ...]:
    """The innermost lines of an equation outside JAX and jamp, and any library."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    found = []
    for outside in (TRANSFORMS, TRANSFORMS + LIBRARIES):
        for frame in frames:
            if not frame.file_name.startswith(outside):
                found.append(f"{Path(frame.file_name).name}:{frame.line_num}")
                break
    return tuple(dict.fromkeys(found))


def casts_in_jaxpr(jaxpr: Any) -> int:
    """How many equations of a jaxpr, inner ones included, change a dtype."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype
        for eqn in equations(jaxpr, once=False)
    )


def casts_in_hlo(text: str) -> int:
    """How many instructions of an HLO text change a dtype, fused ones included."""
    return len(re.findall(r" = \S+ convert\(", text))

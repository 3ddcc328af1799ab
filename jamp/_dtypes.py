"""Which dtypes autocast may change, and how they rank."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DType = np.dtype[Any]

FLOAT32: DType = np.dtype(np.float32)
FLOAT16: DType = np.dtype(np.float16)
BFLOAT16: DType = np.dtype(jnp.bfloat16)
# What autocast may lower to.
LOW_DTYPES = (FLOAT16, BFLOAT16)
LOW_NAMES = " or ".join(dtype.name for dtype in LOW_DTYPES)


def dtype_of(atom: Any) -> Any:
    """Dtype of a variable, literal or value; None for what has none, as a token."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> tuple[Any, ...]:
    """Shape of a variable, literal or value; empty for what has none."""
    return getattr(atom.aval, "shape", ())


def size_of(shape: Iterable[Any]) -> int | None:
    """The number of elements; None of a shape with a size that is not known yet."""
    sizes = [*shape]
    known = all(isinstance(size, int) for size in sizes)
    return math.prod(sizes) if known else None


def known_size(shape: Iterable[Any]) -> int:
    """The number of elements; 0 of a shape with a size that is not known yet."""
    return size_of(shape) or 0


@cache
def eligible(dtype: Any) -> bool:
    """Whether autocast may cast values of this dtype.

    Floating point other than float64: float32, both 16-bit types and float8. Complex,
    integer and boolean values, keys and references never are.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize <= 4


def is_complex(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "c"


def exceeds_16_bits(dtype: Any) -> bool:
    """Whether it has integers that no 16-bit floating point has."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iu" and dtype.itemsize > 1


def below_float32(dtype: Any) -> bool:
    """Whether values of this dtype may be cast and are narrower than float32."""
    return eligible(dtype) and dtype.itemsize < 4


def is_double(dtype: Any) -> bool:
    """Whether it is float64, or complex of such: its whole equation runs as traced."""
    return dtype in (np.float64, np.complex128)


def in_range(number: float, dtype: DType) -> bool:
    """Whether a number is zero or among the normal ones of a dtype."""
    limits = jnp.finfo(dtype)
    size = abs(number)
    return size == 0 or float(limits.smallest_normal) <= size <= float(limits.max)


def widened(value: Any) -> Any:
    """A value in float32, if it is an array in a narrower floating dtype."""
    # Promotion would not do: float8 has no implicit one.
    return (
        value.astype(FLOAT32) if below_float32(getattr(value, "dtype", None)) else value
    )


@cache
def _wider(a: DType, b: DType) -> DType:
    try:
        return np.dtype(jnp.promote_types(a, b))
    except jax.dtypes.TypePromotionError:
        # Two float8 types, or float8 beside a 16-bit type: float32 holds both.
        return FLOAT32


def widest(dtypes: Iterable[DType]) -> DType:
    first, *rest = dtypes
    for dtype in rest:
        first = _wider(first, dtype)
    return first


def in_dtype(aval: Any, dtype: Any) -> Any:
    """An abstract value in a dtype; what has none stays as it is."""
    if getattr(aval, "dtype", None) == dtype:
        return aval
    return aval.update(dtype=dtype, weak_type=False)


def all_in_dtypes(atoms: Iterable[Any], dtypes: Iterable[Any]) -> list[Any]:
    pairs = zip(atoms, dtypes, strict=True)
    return [in_dtype(atom.aval, dtype) for atom, dtype in pairs]

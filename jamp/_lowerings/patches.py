"""Convolutions as products of patches with the weights, which is known as im2col.

A patch is what meets the window at one place of the result. Patches are made of slices,
one for each place in the window, or in the result if there are fewer of these, and of
some pictures at a time, so that they stay in the cache.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.pictures import (
    ConvParams,
    arranged,
    as_bits,
    from_bits,
    merged,
    padded,
    rounded,
    window_sizes,
    zeros_after,
)
from jamp._lowerings.product import multiply_on_cpu
from jamp._lowerings.slices import (
    Steps,
    neighbours_folded,
    part_of,
    slices_of,
    steps_of,
)

# Of fewer, a loop takes longer.
_LEAST_BYTES = 2**20
# Rows of the result for each row that is met beyond these.
_LEAST_ROWS = 8


def by_windows(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """Patches of pictures times the weights, so many that they stay in the cache.

    A patch is all that a window meets, or what one of its rows does: then each row of
    the pictures is multiplied with all rows of the window, and what belongs together is
    added up. At a time it is those of some pictures, or of some rows of one.
    """
    (batch, feature, *_), (out, into, *window), out_spec = conv.dimension_numbers
    windows = window_sizes(rhs, conv)
    steps = steps_of(lhs, conv, outs, conv.window_strides, windows, conv.rhs_dilation)
    if math.prod(windows) == 1:
        weights = lax.transpose(rhs, (*window, into, out)).reshape(rhs.shape[into], -1)
        return _multiply_windows(padded(lhs, conv), weights, conv, steps, to)
    by_rows = _are_by_rows(rhs, conv, steps[0])
    first, *rest = window
    order = (*rest, into, first, out) if by_rows else (*window, into, out)
    columns = rhs.shape[out] * (windows[0] if by_rows else 1)
    weights = lax.transpose(rhs, order).reshape(-1, columns)
    each = _bytes_of_row(weights, outs, by_rows)
    reach = _extra_rows(steps[0]) if by_rows else 0
    pictures = part_of(lhs.shape[batch], (outs[0] + reach) * each)
    size = outs[0] if pictures > 1 else _rows_at_once(outs[0], each, reach)
    multiply = partial(
        _multiply_rows if by_rows else _multiply_windows,
        weights=weights,
        conv=conv,
        to=to,
    )

    def fold(lhs: Any, at: Any) -> tuple[Any, list[Steps]]:
        some = _part(lhs, at * pictures, pictures, batch)
        return neighbours_folded(rounded(some), conv, steps, feature)

    def of_rows(folded: Any, steps: list[Steps], at: Any) -> Any:
        first, *others = steps
        taken = folded.shape[first.dim] - (outs[0] - size) * first.stride
        some = _part(folded, at * size * first.stride, taken, first.dim)
        return as_bits(multiply(some, steps=[first._replace(size=size), *others]))

    parts = lhs.shape[batch] // pictures, outs[0] // size
    if math.prod(parts) == 1:
        return from_bits(of_rows(*fold(lhs, 0), 0))
    results = _in_parts(fold, of_rows, lhs, parts)
    return from_bits(merged(results, (out_spec[0], out_spec[2])))


def _are_by_rows(rhs: Any, conv: ConvParams, rows: Steps) -> bool:
    """Whether patches are of a row of the window."""
    many = _LEAST_ROWS * _extra_rows(rows) <= rows.size
    plain = rows.stride == 1 and len(rows.features) > 1
    return plain and many and _writes_less_by_rows(rhs, conv)


def _writes_less_by_rows(rhs: Any, conv: ConvParams) -> bool:
    """Whether smaller patches spare more than products in float32 add."""
    out, into, first, *others = conv.dimension_numbers.rhs_spec
    count, patch = rhs.shape[first], math.prod(rhs.shape[d] for d in (into, *others))
    # Slices are written, read and written as patches; products are written and read.
    spared = (count - 1) * patch * 3 * BFLOAT16.itemsize
    added = count * rhs.shape[out] * 2 * FLOAT32.itemsize
    return bool(added <= spared)


def _extra_rows(rows: Steps) -> int:
    """How many rows of the pictures are met beyond one for each of the result."""
    return (len(rows.features) - 1) * rows.dilation


def _bytes_of_row(weights: Any, outs: Sequence[int], by_rows: bool) -> int:
    """What is written for a row of the result: patches, and products to add up."""
    patch, features = weights.shape
    each: int = patch * BFLOAT16.itemsize + features * FLOAT32.itemsize * by_rows
    return math.prod(outs[1:]) * each


def _rows_at_once(rows: int, each: int, reach: int) -> int:
    """How many rows of so many bytes to take at a time, which meet some more."""
    size = part_of(rows, each)
    if size * each < _LEAST_BYTES:
        return rows
    return next(
        n for n in range(max(size, _LEAST_ROWS * reach), rows + 1) if rows % n == 0
    )


def _in_parts(
    fold: Callable[[Any, Any], tuple[Any, list[Steps]]],
    of_rows: Callable[[Any, list[Steps], Any], Any],
    lhs: Any,
    parts: tuple[int, int],
) -> Any:
    """The results of so many pictures at a time, and of so many of their rows.

    All are written into one array, or XLA would write those of a picture twice.
    """
    one = jax.eval_shape(lambda lhs: of_rows(*fold(lhs, 0), 0), lhs)
    lhs, zeros = zeros_after(lhs, (*parts, *one.shape), one)

    def write_some(some: Any, results: Any) -> Any:
        folded, steps = fold(lhs, some)

        def write(row: Any, results: Any) -> Any:
            result = lax.expand_dims(of_rows(folded, steps, row), (0, 1))
            first = some, row, *[0] * one.ndim
            return lax.dynamic_update_slice(results, result, first)

        return _repeated(parts[1], write, results)

    return _repeated(parts[0], write_some, zeros)


def _part(array: Any, start: Any, size: int, axis: int) -> Any:
    if size == array.shape[axis]:
        return array
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def _repeated(count: int, body: Callable[[Any, Any], Any], init: Any) -> Any:
    return lax.fori_loop(0, count, body, init) if count > 1 else body(0, init)


def _multiply_windows(
    lhs: Any, weights: Any, conv: ConvParams, steps: Sequence[Steps], to: DType
) -> Any:
    """The result for padded pictures, of their patches at once.

    Patches are stacked slices, one for each place in the window.
    """
    (batch, feature, *_), _, out_spec = conv.dimension_numbers
    patches = from_bits(lax.concatenate(slices_of(lhs, feature, steps), feature))
    numbers: Any = ((feature,), (0,)), ((), ())
    result = multiply_on_cpu(patches, weights, numbers, to)
    kept = [batch, *(of.dim for of in steps)]
    where = [sorted(kept).index(d) for d in kept]
    order = [where[0], len(kept), *where[1:]]
    return arranged(result, order, out_spec)


def _multiply_rows(
    lhs: Any, weights: Any, conv: ConvParams, steps: Sequence[Steps], to: DType
) -> Any:
    """The same of patches of a row of the window, times the weights of all its rows."""
    rows, *others = steps
    count = len(rows.features)
    met = rows._replace(size=lhs.shape[rows.dim], features=rows.features[:1])
    result = _multiply_windows(lhs, weights, conv, [met, *others], FLOAT32)
    _, feature, along, *_ = conv.dimension_numbers.out_spec
    each = result.shape[feature] // count

    def of_row(at: int) -> Any:
        some = lax.slice_in_dim(result, at * each, (at + 1) * each, axis=feature)
        start = at * rows.dilation
        return lax.slice_in_dim(some, start, start + rows.size, axis=along)

    return lax.convert_element_type(sum(map(of_row, range(1, count)), of_row(0)), to)

"""Convolutions of 16-bit arrays; on CPUs as matrix products where these are faster.

XLA has no 16-bit convolutions for CPUs, but products: patches of the pictures times the
weights (im2col). Writing the patches costs as much as some 200 multiplications with
each of their elements, so that it depends on the shapes what is faster. Convolutions of
each feature by itself are sums; see docs/experiments.md.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp._compat import trace_context
from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.bilinear import PRECISION, Taken, define, in_float32, run_as
from jamp._lowerings.depthwise import (
    depthwise,
    gradient_of_depthwise,
    is_depthwise,
    is_gradient_of_depthwise,
)
from jamp._lowerings.patches import by_windows
from jamp._lowerings.pictures import (
    ConvParams,
    arranged,
    as_bits,
    from_bits,
    merged,
    ordered,
    rounded,
    window_sizes,
)
from jamp._lowerings.places import are_by_rows, by_places
from jamp._lowerings.processor import this_processor
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32
from jamp._lowerings.tiles import has_tiles, into_tiles, makes_tiles, of_tiles

# Patches are worth their time if each of their elements meets so many output features,
# and if they have so many input features.
_LEAST_REUSED, _LEAST_REUSED_IF_FAST, _LEAST_REUSED_WITH_AMX = 256, 64, 48
_LEAST_FEATURES = 8
# With AMX, with which this was measured, it is more of few features in large pictures:
# their slices are short and many.
_FEW_FEATURES, _LARGE_PICTURE, _LEAST_REUSED_OF_FEW = 48, 64**2, 96
# With AVX512-BF16 alone, of the gradient of weights it is more: its patches lie across.
# It is fewer where its slices are of rows.
_LEAST_REUSED_BY_PLACES, _LEAST_REUSED_BY_ROWS = 128, 32
# With AMX, fewer suffice for the gradient of weights if patches have so many elements
# that XLA's own leave the cache.
_LEAST_OF_MANY, _MANY = 32, 2**23
# Of more, programs get too long.
_MOST_SLICES = 64
# Tiles, which need no slices, are worth theirs if a patch has so many elements.
_LEAST_IN_TILES = 128
# Of fewer features of the result, phases take longer than moving its tiles.
_LEAST_PHASED = 16

_Form = Callable[[Any, Any, ConvParams, Sequence[int], DType], Any]


def _convolve_on_cpu(
    lhs: Any, rhs: Any, taken: Taken, params: Mapping[str, Any]
) -> Any:
    """The convolution of two arrays of one 16-bit dtype, added up in float32.

    XLA convolves in float32, and need not have the pictures rounded that are at hand as
    they were. Weights are: they may be stored so.
    """
    conv, to = ConvParams.of(params), params["preferred_element_type"]
    # On several devices each would take patches of all pictures.
    if lhs.dtype == BFLOAT16 and taken.whole and _may_be_parts(lhs, rhs):
        if all(d == 1 for d in conv.lhs_dilation):
            return _convolved(lhs, rhs, conv, to, taken.wide[0])
        if all(s == 1 for s in (*conv.window_strides, *conv.rhs_dilation)):
            return _by_phases(lhs, rhs, conv, to)
    return _by_xla(taken.wide[0], rhs, conv, to, params["out_sharding"])


def _may_be_parts(lhs: Any, rhs: Any) -> bool:
    sizes = [*lhs.shape, *rhs.shape]
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    return known and this_processor().of_x86


def _rounds_parts(
    place: int, lhs: Any, rhs: Any, *, dtype: DType, **params: Any
) -> bool:
    """Whether a convolution rounds its pictures itself, as it makes patches of them."""
    if MOVES_BFLOAT16_AS_FLOAT32 or dtype != BFLOAT16 or place != 0:
        return False
    conv = ConvParams.of(params)
    if any(d != 1 for d in conv.lhs_dilation) or not _may_be_parts(lhs, rhs):
        return False
    outs = _out_sizes(lhs, rhs, conv)
    return _are_of_slices(_form_of(lhs, rhs, conv, outs), rhs, conv, outs)


def _convolved(lhs: Any, rhs: Any, conv: ConvParams, to: DType, wide: Any) -> Any:
    """A convolution without a dilated left operand."""
    outs = _out_sizes(lhs, rhs, conv)
    form = _form_of(lhs, rhs, conv, outs)
    if form is None:
        return _by_xla(wide, rhs, conv, to)
    if form not in (_with_features_last, _with_sums_first):
        return form(wide, rhs, conv, outs, to)
    if not _are_of_slices(form, rhs, conv, outs):
        return form(lhs, rhs, conv, outs, to)
    # Pictures are rounded part by part: XLA would write them all, twice if they are
    # padded in two ways. Where it moves 16 bits as float32, it rounds them all anyway.
    pictures = rounded(lhs) if MOVES_BFLOAT16_AS_FLOAT32 else wide
    return form(pictures, rhs, conv, outs, to)


def _are_of_slices(
    form: _Form | None, rhs: Any, conv: ConvParams, outs: Sequence[int]
) -> bool:
    """Whether a form makes patches of several slices of the pictures."""
    if form is _with_features_last:
        return math.prod(window_sizes(rhs, conv)) > 1
    return form is _with_sums_first and math.prod(outs) > 1


def _form_of(lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int]) -> _Form | None:
    """What computes a convolution without a dilated left operand, if not XLA."""
    window, places = math.prod(window_sizes(rhs, conv)), math.prod(outs)
    if places and is_depthwise(lhs, rhs, conv) and window <= _MOST_SLICES:
        return depthwise
    of_weights = conv.batch_group_count > 1 and 0 < places <= _MOST_SLICES
    if of_weights and is_gradient_of_depthwise(lhs, rhs, conv):
        return gradient_of_depthwise
    in_groups = conv.feature_group_count > 1 or conv.batch_group_count > 1
    by_window = window <= places and not of_weights
    worth = places and not in_groups and _are_worth(lhs, rhs, conv, outs, by_window)
    if not in_groups and has_tiles(rhs, conv, outs):
        reused, into = (rhs.shape[d] for d in conv.dimension_numbers.rhs_spec[:2])
        large = window * into >= _LEAST_IN_TILES and reused >= _LEAST_REUSED_IF_FAST
        of_gradient = not by_window or math.prod(conv.rhs_dilation) > 1
        if window > 1 and (places > 1 if of_gradient else large and not worth):
            return of_tiles
    if not (of_weights or worth):
        return None
    return _with_features_last if by_window else _with_sums_first


def _with_features_last(
    pictures: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """The product of patches by windows, the features of pictures and result last.

    Patches would take longer to transpose than both. What is elementwise between two
    such convolutions XLA computes in their order, and transposes neither.
    """
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    batch, feature, *spatial = lhs_spec
    pictures, lhs_spec = ordered(pictures, lhs_spec, (batch, *spatial, feature))
    last = 0, len(lhs_spec) - 1, *range(1, len(lhs_spec) - 1)
    numbers = lax.ConvDimensionNumbers(lhs_spec, rhs_spec, last)
    conv = conv._replace(dimension_numbers=numbers)
    result = by_windows(pictures, rhs, conv, outs, to)
    return from_bits(arranged(as_bits(result), last, out_spec))


def _with_sums_first(
    pictures: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """The product of patches by places, with what adds up first.

    Patches would take longer to transpose.
    """
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    (batch, feature, *spatial), (out, into, *window) = lhs_spec, rhs_spec
    pictures, lhs_spec = ordered(pictures, lhs_spec, (feature, *spatial, batch))
    moved, rhs_spec = ordered(rhs, rhs_spec, (into, *window, out))
    numbers = lax.ConvDimensionNumbers(lhs_spec, rhs_spec, out_spec)
    conv = conv._replace(dimension_numbers=numbers)
    return by_places(pictures, from_bits(moved), conv, outs, to)


def _are_worth(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], by_window: bool
) -> bool:
    """Whether patches are worth their time."""
    reused, into = (rhs.shape[d] for d in conv.dimension_numbers.rhs_spec[:2])
    if by_window:
        count = math.prod(window_sizes(rhs, conv))
        # Slices of few features take longer to stack than the convolution.
        worth = into >= _LEAST_FEATURES and reused >= _least_by_windows(lhs, rhs, conv)
    else:
        count = math.prod(outs)
        strided = math.prod(conv.rhs_dilation) > 1
        worth = strided or reused >= _least_by_places(lhs, rhs, conv, outs)
    return count == 1 or (count <= _MOST_SLICES and worth)


def _least_by_windows(lhs: Any, rhs: Any, conv: ConvParams) -> int:
    """How many output features each element of a patch has to meet."""
    processor, numbers = this_processor(), conv.dimension_numbers
    if not processor.gains:
        return _LEAST_REUSED
    if not processor.has_amx:
        return _LEAST_REUSED_IF_FAST
    few = rhs.shape[numbers.rhs_spec[1]] < _FEW_FEATURES
    pixels = math.prod(lhs.shape[d] for d in numbers.lhs_spec[2:])
    large = pixels >= _LARGE_PICTURE
    return _LEAST_REUSED_OF_FEW if few and large else _LEAST_REUSED_WITH_AMX


def _least_by_places(lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int]) -> int:
    """The same in a gradient of weights.

    The left operand has the features of the pictures where others have a batch, and the
    pictures where others have features.
    """
    processor, numbers = this_processor(), conv.dimension_numbers
    if not processor.gains:
        return _LEAST_REUSED
    many = math.prod(outs) * lhs.size >= _MANY
    # One picture's patches are made at once, and leave the cache themselves.
    alone = many and rhs.shape[numbers.rhs_spec[1]] == 1
    if are_by_rows(lhs, rhs, conv, outs):
        in_cache = processor.has_amx or not alone
        return _LEAST_REUSED_BY_ROWS if in_cache else _LEAST_REUSED_BY_PLACES
    if alone:
        return _LEAST_REUSED
    if not processor.has_amx:
        return _LEAST_REUSED_BY_PLACES
    enough = many and lhs.shape[numbers.lhs_spec[0]] >= _LEAST_OF_MANY
    return _LEAST_OF_MANY if enough else _LEAST_REUSED_IF_FAST


def _by_xla(
    lhs: Any, rhs: Any, conv: ConvParams, to: DType, out_sharding: Any = None
) -> Any:
    lhs, rhs = (lax.convert_element_type(array, FLOAT32) for array in (lhs, rhs))
    params = {
        **conv._replace(padding=tuple(conv.padding))._asdict(),
        "precision": PRECISION,
        "preferred_element_type": None,
        "out_sharding": out_sharding,
    }
    # The public function takes no padding that depends on sizes that are not known.
    of_jax = lax.conv_general_dilated_p
    result = of_jax.bind(lhs, rhs, **of_jax.get_bind_params(params))
    return lax.convert_element_type(result, to)


def _out_sizes(lhs: Any, rhs: Any, conv: ConvParams) -> list[int]:
    (_, _, *spatial), (_, _, *window), _ = conv.dimension_numbers
    sizes = []
    for at, (low, high) in enumerate(conv.padding):
        size = (lhs.shape[spatial[at]] - 1) * conv.lhs_dilation[at] + 1
        reach = (rhs.shape[window[at]] - 1) * conv.rhs_dilation[at] + 1
        room = low + size + high - reach
        sizes.append(max(0, room // conv.window_strides[at] + 1))
    return sizes


def _by_phases(lhs: Any, rhs: Any, conv: ConvParams, to: DType) -> Any:
    """A convolution whose left operand is dilated, as the gradients of strided ones.

    Places of the result that are equal modulo the dilation meet the same places of the
    window, and no zeros: each such phase is a convolution without dilation.
    """
    dilations = conv.lhs_dilation
    spatial = conv.dimension_numbers.out_spec[2:]
    outs = _out_sizes(lhs, rhs, conv)
    features = rhs.shape[conv.dimension_numbers.rhs_spec[0]]
    phased = features >= _LEAST_PHASED and math.prod(dilations) <= _MOST_SLICES
    if not phased and makes_tiles(rhs, conv):
        return into_tiles(lhs, rhs, conv, outs, to)
    if math.prod(map(min, dilations, window_sizes(rhs, conv))) > _MOST_SLICES:
        return _by_xla(lhs, rhs, conv, to)
    rounds = [-(-size // d) for size, d in zip(outs, dilations, strict=True)]
    stacked = jnp.stack(
        [
            as_bits(
                _phase(lhs, rhs, conv, to, zip(phase, dilations, rounds, strict=True))
            )
            for phase in itertools.product(*map(range, dilations))
        ]
    )
    stacked = stacked.reshape(*dilations, *stacked.shape[1:])
    result = merged(stacked, spatial, minor=True)
    for d, size in zip(spatial, outs, strict=True):
        result = lax.slice_in_dim(result, 0, size, axis=d)
    return from_bits(result)


def _phase(
    lhs: Any,
    rhs: Any,
    conv: ConvParams,
    to: DType,
    phases: Iterable[tuple[int, int, int]],
) -> Any:
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    padding = []
    count = lhs.shape[lhs_spec[0]] // conv.batch_group_count
    sizes = {out_spec[0]: count, out_spec[1]: rhs.shape[rhs_spec[0]]}
    for at, (phase, dilation, size) in enumerate(phases):
        low, _ = conv.padding[at]
        first = min((low - phase) % dilation, rhs.shape[rhs_spec[2 + at]])
        rhs = lax.slice_in_dim(rhs, first, None, dilation, axis=rhs_spec[2 + at])
        low = (low - phase - first) // dilation
        taps = rhs.shape[rhs_spec[2 + at]]
        padding.append((low, size + taps - 1 - lhs.shape[lhs_spec[2 + at]] - low))
        sizes[out_spec[2 + at]] = size
    if rhs.size == 0:
        return jnp.zeros([sizes[d] for d in range(lhs.ndim)], to)
    dense = conv._replace(padding=padding, lhs_dilation=(1,) * len(padding))
    return _convolved(lhs, rhs, dense, to, lhs)


@lru_cache(maxsize=1024)
def _gradient_program(
    place: int, avals: Sequence[Any], conv: ConvParams, context: Hashable
) -> Any:
    """JAX's program for the gradient of one operand: of the cotangent and the other.

    Its equations keep the context that they are traced in.
    """
    cotangent, other, wanted = avals

    def gradient(cotangent: Any, other: Any) -> Any:
        def convolve(wanted: Any) -> Any:
            pair = (other, wanted) if place else (wanted, other)
            return lax.conv_general_dilated(*pair, **conv._asdict())

        return jax.linear_transpose(convolve, wanted)(cotangent)[0]

    return jax.make_jaxpr(gradient)(cotangent, other)


def _gradient(place: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    wanted, other = (rhs.aval, lhs) if place else (lhs.aval, rhs)
    avals = in_float32([jax.typeof(cotangent), jax.typeof(other), wanted])
    program = _gradient_program(place, avals, ConvParams.of(params), trace_context())
    params = {**params, "preferred_element_type": wanted.dtype}
    of_jax = lax.conv_general_dilated_p
    return run_as(convolution_p, of_jax, program, [cotangent, other], params)


convolution_p, convolution_of_weights_p = define(
    lax.conv_general_dilated_p,
    _convolve_on_cpu,
    _gradient,
    rounds_parts=_rounds_parts,
)

"""Joining, gathering, moving, scattering, padding, diagonals and random draws."""

import jax
import jax.numpy as jnp

from ._case import (
    OpCase,
    Spec,
    ascending,
    distinct,
    integer,
    normal,
    positive,
    probability,
)

_PAIR = (normal(4, 8), normal(4, 8))
_X = (normal(4, 8),)
_ROWS = (normal(8, 4), distinct(8, 3), normal(3, 4))


def _pad(rank: int, mode: str):
    """Pads the last `rank` axes by 2 on either side."""

    def fn(x):
        widths = [(0, 0)] * (x.ndim - rank) + [(2, 2)] * rank
        return jnp.pad(x, widths, mode=mode)

    return fn


def _pad_case(op: str, rank: int, mode: str) -> OpCase:
    inputs: tuple[Spec, ...] = (normal(2, 3, *(5,) * rank),)
    return OpCase(op, _pad(rank, mode), inputs, f'jnp.pad(x, widths, mode="{mode}")')


def _take(x, places):
    return x[places]


def _set_rows(x, rows, values):
    return x.at[rows].set(values)


def _add_rows(x, rows, values):
    return x.at[rows].add(values)


def _unpool(rank: int):
    """Puts each value where pooling found it, by a flat index per channel."""

    def fn(x, places):
        channels = jnp.arange(len(x))[:, None]
        flat = jnp.zeros((len(x), 4**rank), x.dtype)
        flat = flat.at[channels, places].set(x.reshape(len(x), -1))
        return flat.reshape(len(x), *(4,) * rank)

    return fn


_JOINS = (
    OpCase(
        "cat", lambda x, y: jnp.concatenate([x, y]), _PAIR, "jnp.concatenate([x, y])"
    ),
    OpCase("stack", lambda x, y: jnp.stack([x, y]), _PAIR, "jnp.stack([x, y])"),
)

_GATHERS = (
    OpCase("embedding", _take, (normal(8, 4), integer(8, 5)), "table[tokens]"),
    OpCase("index_select", _take, (normal(8, 4), integer(8, 3)), "x[rows]"),
    OpCase(
        "gather",
        lambda x, places: jnp.take_along_axis(x, places, axis=1),
        (normal(4, 8), integer(8, 4, 3)),
        "jnp.take_along_axis(x, places, axis=1)",
    ),
)

_MOVES = (
    OpCase("roll", lambda x: jnp.roll(x, 2, axis=1), _X, "jnp.roll(x, 2, axis=1)"),
    OpCase("flip", lambda x: jnp.flip(x, 1), _X, "jnp.flip(x, 1)"),
    OpCase("rot90", jnp.rot90, _X, "jnp.rot90(x)"),
    OpCase("tile", lambda x: jnp.tile(x, (2, 1)), _X, "jnp.tile(x, (2, 1))"),
    OpCase(
        "repeat_interleave",
        lambda x: jnp.repeat(x, 2, axis=1),
        _X,
        "jnp.repeat(x, 2, axis=1)",
    ),
    OpCase("split", lambda x: jnp.split(x, 2, axis=1), _X, "jnp.split(x, 2, axis=1)"),
    OpCase(
        "bucketize", jnp.digitize, (normal(4, 8), ascending(5)), "jnp.digitize(x, bins)"
    ),
)

_SCATTERS = (
    OpCase("index_add", _add_rows, _ROWS, "x.at[rows].add(values)"),
    OpCase(
        "scatter_reduce",
        lambda x, rows, values: x.at[rows].max(values),
        _ROWS,
        "x.at[rows].max(values)",
    ),
    OpCase("index_copy", _set_rows, _ROWS, "x.at[rows].set(values)"),
    OpCase("index_put", _set_rows, _ROWS, "x.at[rows].set(values)"),
    OpCase(
        "scatter_add",
        _add_rows,
        (normal(8, 4), integer(8, 12), normal(12, 4)),
        "x.at[rows].add(values)",
    ),
    OpCase(
        "max_unpool2d",
        _unpool(2),
        (normal(3, 2, 2), distinct(16, 1, 4)),
        "jnp.zeros(shape, x.dtype).at[channels, places].set(x)",
    ),
    OpCase(
        "max_unpool3d",
        _unpool(3),
        (normal(3, 2, 2, 2), distinct(64, 1, 8)),
        "jnp.zeros(shape, x.dtype).at[channels, places].set(x)",
    ),
)

_PADS = (
    _pad_case("constant_pad_nd", 1, "constant"),
    _pad_case("reflection_pad1d", 1, "reflect"),
    _pad_case("reflection_pad2d", 2, "reflect"),
    _pad_case("replication_pad1d", 1, "edge"),
    _pad_case("replication_pad2d", 2, "edge"),
    _pad_case("replication_pad3d", 3, "edge"),
)

_MATRICES = (
    OpCase(
        "block_diag",
        jax.scipy.linalg.block_diag,
        (normal(3, 4), normal(2, 5)),
        "jax.scipy.linalg.block_diag(x, y)",
    ),
    OpCase("diag", jnp.diag, (normal(6),), "jnp.diag(x)"),
    OpCase("diagflat", jnp.diagflat, (normal(2, 3),), "jnp.diagflat(x)"),
    OpCase("tril", jnp.tril, (normal(5, 6),), "jnp.tril(x)"),
    OpCase("triu", jnp.triu, (normal(5, 6),), "jnp.triu(x)"),
    OpCase("vander", lambda x: jnp.vander(x, 4), (positive(6),), "jnp.vander(x, 4)"),
    OpCase("cross", jnp.cross, (normal(4, 3), normal(4, 3)), "jnp.cross(x, y)"),
)

_RANDOM = (
    OpCase(
        "multinomial",
        lambda p: jax.random.categorical(jax.random.key(0), jnp.log(p)),
        (probability(4, 8),),
        "jax.random.categorical(key, jnp.log(p))",
        values=False,
    ),
    OpCase(
        "poisson",
        lambda rate: jax.random.poisson(jax.random.key(0), rate).astype(rate.dtype),
        (positive(4, 8),),
        "jax.random.poisson(key, rate).astype(rate.dtype)",
        values=False,
    ),
)

CASES = (*_JOINS, *_GATHERS, *_MOVES, *_SCATTERS, *_PADS, *_MATRICES, *_RANDOM)

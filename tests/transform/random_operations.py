"""Operations of random programs, each with a bound of what it does to errors.

They map values within [-1, 1] to such values, so that the bounds can be stated.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHAPES = {"m": (4, 4), "v": (4,), "s": (), "w": (4, 4), "k": (3, 3, 1, 1)}
# Arguments of every program, by kind: matrices, vectors, scalars, weights, a kernel.
LEAVES = {
    "x": "m",
    "y": "m",
    "v": "v",
    "b": "v",
    "s": "s",
    "w": "w",
    "u": "w",
    "k": "k",
}
ROWS = np.array([2, 0, 3, 0], np.int32)
MASK = np.array([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]], bool)


def arguments(seed=0):
    """Values within [-1, 1]; absolute weights of one output sum to at most 1."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.uniform(-1, 1, SHAPES[kind]) for name, kind in LEAVES.items()}
    for name in "wu":
        # Close to a permutation, so that products do not shrink towards zero.
        drawn[name] = 0.1 * drawn[name] + 0.6 * rng.permutation(np.eye(4))
    drawn["k"] /= np.abs(drawn["k"]).sum()
    values = {name: v.astype(np.float32) for name, v in drawn.items()}
    return jax.device_put(values | {"n": ROWS, "mask": MASK})


class Op(NamedTuple):
    """An operation.

    Attributes:
      fn: the function of its operands, and of `n` and `mask` if it needs them.
      takes: a letter for the kind of each operand; `*` is any kind, the same for all.
      gives: the kind of its result.
      gains: for each operand, a bound of the largest row sum of the absolute Jacobian.
      curve: a bound of how fast these sums change; infinite if they jump.
      roundings: how many units of the 16-bit dtype its own roundings come to.
      unit: the least unit, if it casts to 16 bits itself.
    """

    fn: Callable[..., Any]
    takes: str
    gives: str
    gains: tuple[float, ...] = (1,)
    curve: float = 0
    roundings: float = 2
    unit: float = 0


KINK = math.inf
# Half the distance from 1 to the next number: what rounding a number to it may change.
UNIT = {jnp.float16: 2.0**-11, jnp.bfloat16: 2.0**-8}


def convolved(x, k):
    return lax.conv_general_dilated(
        x[None, :, :, None],
        k,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0, :, :, 0]


def softmax_by_hand(x):
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, v, b):
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * lax.rsqrt(variance + 1) * v + b) / 4


def gelu_by_hand(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gated(x, w, b):
    gate, up = jnp.split(x @ w + b, 2, -1)
    return jnp.concatenate([jnp.tanh(gate) * up, up], -1) / 2


def windows(x, start, function):
    return lax.reduce_window(x, start, function, (2, 2), (1, 1), "SAME")


MATRICES = {
    "matmul": Op(lambda x, w: x @ w, "mw", "m", (1, 4), 4, 3),
    "linear": Op(lambda x, w, b: (x @ w + b) / 2, "mwv", "m", (0.5, 2, 0.5), 2, 4),
    "gated": Op(gated, "mwv", "m", (1.5, 6, 1.5), 16, 6),
    "product": Op(lambda x, y: x @ y / 4, "mm", "m", (1, 1), 1, 4),
    "scores": Op(
        lambda x, y: jnp.einsum("ij,kj->ik", x, y) / 4, "mm", "m", (1, 1), 1, 4
    ),
    "three": Op(
        lambda x, w, y: jnp.einsum("ij,jk,kl->il", x, w, y) / 4,
        "mwm",
        "m",
        (1, 4, 1),
        8,
        6,
    ),
    "precise": Op(
        lambda x, w: jnp.matmul(x, w, precision="highest"), "mw", "m", (1, 4), 4, 3
    ),
    "convolution": Op(convolved, "mk", "m", (1, 9), 9, 3),
    "rows_times": Op(lambda x, n: jax.nn.one_hot(n, 4) @ x, "m", "m", roundings=2),
    "softmax": Op(jax.nn.softmax, "m", "m", (0.5,), 1, 3),
    "softmax_by_hand": Op(softmax_by_hand, "m", "m", (0.5,), 1, 5),
    "masked": Op(
        lambda x, mask: jax.nn.softmax(jnp.where(mask, x, -1e9)), "m", "m", (0.5,), 1, 3
    ),
    "hidden": Op(
        lambda x, mask: jax.nn.softmax(x + jnp.where(mask, 0.0, -jnp.inf)),
        "m",
        "m",
        (0.5,),
        1,
        4,
    ),
    "standardize": Op(
        lambda x: jax.nn.standardize(x, epsilon=1.0) / 2, "m", "m", (1,), 2, 4
    ),
    "layer_norm": Op(layer_norm, "mvv", "m", (0.5, 0.5, 0.25), 1, 6),
    "kept": Op(lambda x, y, mask: jnp.where(mask, x, y), "mm", "m", (1, 1)),
    "dropped": Op(lambda x, mask: jnp.where(mask, x, 0.0), "m", "m"),
    "counted": Op(lambda x, mask: mask.astype(jnp.float32) * x, "m", "m"),
    "transposed": Op(jnp.transpose, "m", "m"),
    "reshaped": Op(lambda x: x.reshape(2, 8).T.reshape(4, 4), "m", "m"),
    "gathered": Op(lambda x, n: x[n], "m", "m"),
    "scattered": Op(lambda x, n: x.at[n].add(x / 2) / 3, "m", "m", (1,), 0, 5),
    "updated": Op(lambda x, v: x.at[1].set(v), "mv", "m", (1, 1)),
    "joined": Op(lambda x, y: jnp.concatenate([x[:1], y[1:]]), "mm", "m", (1, 1)),
    "padded": Op(lambda x: jnp.pad(x[:2], ((1, 1), (0, 0))), "m", "m"),
    "sliced": Op(
        lambda x, n: jnp.tile(lax.dynamic_slice(x, (n[0], 0), (2, 4)), (2, 1)), "m", "m"
    ),
    "pooled": Op(lambda x: windows(x, 0.0, lax.add) / 4, "m", "m", (1,), 0, 3),
    "max_pooled": Op(lambda x: windows(x, -jnp.inf, lax.max), "m", "m", (1,), KINK),
    "spread": Op(lambda v: jnp.broadcast_to(v, (4, 4)), "v", "m"),
    "outer": Op(jnp.outer, "vv", "m", (1, 1), 1, 3),
    "row_scaled": Op(lambda x, v: x * v[:, None], "mv", "m", (1, 1), 1, 3),
    "shifted": Op(lambda x, v: (x + v) / 2, "mv", "m", (0.5, 0.5), 0, 3),
    "scaled": Op(lambda x, s: x * s, "ms", "m", (1, 1), 1, 3),
}

VECTORS = {
    "means": Op(lambda x: x.mean(0), "m", "v", roundings=3),
    "sums": Op(lambda x: x.sum(1) / 4, "m", "v", roundings=3),
    "variances": Op(lambda x: x.var(0), "m", "v", (2,), 3, 3),
    "largest": Op(lambda x: x.max(0), "m", "v", (1,), KINK),
    "log_sum_exp": Op(lambda x: jax.nn.logsumexp(x, 0) / 3, "m", "v", (1 / 3,), 0.5, 3),
    "masked_sum_exp": Op(
        lambda x, mask: jax.nn.logsumexp(jnp.where(mask, x, -jnp.inf), -1) / 3,
        "m",
        "v",
        (1 / 3,),
        0.5,
        3,
    ),
    "applied": Op(lambda x, v: x @ v / 4, "mv", "v", (1, 1), 1, 4),
    "dense": Op(lambda v, w, b: (v @ w + b) / 2, "vwv", "v", (0.5, 2, 0.5), 2, 4),
    "diagonal": Op(jnp.diagonal, "m", "v"),
    "row": Op(lambda x, n: x[n[0]], "m", "v"),
    "softmaxed": Op(jax.nn.softmax, "v", "v", (0.5,), 1, 3),
    "numbered": Op(lambda v: v * jnp.arange(4.0) / 4, "v", "v", (0.75,), 0, 4),
    "indexed": Op(lambda v, n: v * n.astype(jnp.float32) / 4, "v", "v", (0.75,), 0, 4),
    "filled": Op(lambda s: jnp.full((4,), s), "s", "v"),
    "weighed": Op(lambda v, s: v * s, "vs", "v", (1, 1), 1, 3),
}

SCALARS = {
    "mean": Op(jnp.mean, "m", "s", roundings=3),
    "average": Op(jnp.mean, "v", "s", roundings=3),
    "vdot": Op(lambda v, b: jnp.vdot(v, b) / 4, "vv", "s", (1, 1), 1, 4),
    "norm": Op(lambda v: jnp.sqrt(jnp.sum(v * v) + 1) / 3, "v", "s", (1,), 2, 4),
    "element": Op(lambda x: x[1, 2], "m", "s"),
    "trace": Op(lambda x: jnp.trace(x) / 4, "m", "s", roundings=4),
}

ANY = {
    "sin": Op(jnp.sin, "*", "*", (1,), 1),
    "tanh": Op(jnp.tanh, "*", "*", (1,), 1),
    "relu": Op(jax.nn.relu, "*", "*", (1,), KINK),
    "leaky": Op(lambda x: jnp.where(x > 0, x, 0.1 * x), "*", "*", (1,), KINK, 3),
    "exp": Op(lambda x: jnp.exp(x - 1.0), "*", "*", (1,), 1, 5),
    "gelu": Op(jax.nn.gelu, "*", "*", (1.13,), 1, 3),
    "gelu_by_hand": Op(gelu_by_hand, "*", "*", (1.13,), 1, 6),
    "silu": Op(jax.nn.silu, "*", "*", (1,), 0.5, 3),
    "elu": Op(jax.nn.elu, "*", "*", (1,), 1, 2),
    "sigmoid": Op(jax.nn.sigmoid, "*", "*", (0.25,), 0.1),
    "softplus": Op(lambda x: jax.nn.softplus(x) / 2, "*", "*", (0.5,), 0.25, 3),
    "soft_sign": Op(jax.nn.soft_sign, "*", "*", (1,), 2, 4),
    "cube": Op(lambda x: x**3 / 3, "*", "*", (1,), 2, 3),
    "square": Op(lambda x: x**2 / 2, "*", "*", (1,), 1, 3),
    "root": Op(lambda x: jnp.sqrt(jnp.abs(x) + 1) / 2, "*", "*", (0.25,), KINK, 4),
    "reciprocal": Op(lambda x: 1 / (x + 2), "*", "*", (1,), 2, 6),
    "affine": Op(lambda x: x * 0.5 + 0.25, "*", "*", (0.5,), 0, 4),
    "clip": Op(lambda x: jnp.clip(x, -0.5, 0.5), "*", "*", (1,), KINK),
    "clip_far": Op(lambda x: jnp.clip(x, -1e9, 1e9), "*", "*"),
    "below": Op(lambda x: jnp.minimum(x, 1e30), "*", "*"),
    "above_tiny": Op(lambda x: jnp.maximum(x, 1e-8), "*", "*", (1,), KINK),
    "add_tiny": Op(lambda x: x + 1e-8, "*", "*"),
    "far_and_back": Op(lambda x: x * 1e5 / 1e5, "*", "*", (1,), 0, 5),
    "half": Op(
        lambda x: x.astype(jnp.float16).astype(jnp.float32),
        "*",
        "*",
        unit=UNIT[jnp.float16],
    ),
    "brain": Op(
        lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32),
        "*",
        "*",
        (1,),
        1,
        5,
        UNIT[jnp.bfloat16],
    ),
    "halved_sum": Op(lambda x, y: (x + y) / 2, "**", "*", (0.5, 0.5), 0, 3),
    "halved_difference": Op(lambda x, y: (x - y) / 2, "**", "*", (0.5, 0.5), 0, 3),
    "times": Op(lambda x, y: x * y, "**", "*", (1, 1), 1, 3),
    "over": Op(lambda x, y: x / (y + 2), "**", "*", (1, 1), 3, 7),
    "larger": Op(jnp.maximum, "**", "*", (1, 1), KINK, 3),
    "gated": Op(lambda x, y: x * jax.nn.sigmoid(y), "**", "*", (1, 0.25), 0.5, 4),
}

ORDERED = {
    "sorted": Op(jnp.sort, "*", "*", (1,), KINK),
    "cumsum": Op(lambda x: jnp.cumsum(x, 0) / 4, "*", "*", (1,), 0, 4),
    "cummax": Op(lax.cummax, "*", "*", (1,), KINK),
    "reversed": Op(jnp.flip, "*", "*"),
    "rolled": Op(lambda x: jnp.roll(x, 1, 0), "*", "*"),
}


OPERATIONS = MATRICES | VECTORS | SCALARS | ANY | ORDERED
BY_KIND = {
    "m": MATRICES | ANY | ORDERED,
    "v": VECTORS | ANY | ORDERED,
    "s": SCALARS | ANY,
}
EXTRAS = {
    name: {"n", "mask"} & set(inspect.signature(op.fn).parameters)
    for name, op in OPERATIONS.items()
}

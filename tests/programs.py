"""Small programs, varied in what they compute and in how it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax


class Spec(NamedTuple):
    """A random argument.

    Attributes:
      shape: its shape.
      kind: how it is drawn: normal, positive, integer or bool.
      bound: the integers' bound.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    bound: int = 0


def f(*shape):
    return Spec(shape)


def positive(*shape):
    return Spec(shape, "positive")


def integer(bound, *shape):
    return Spec(shape, "integer", bound)


def boolean(*shape):
    return Spec(shape, "bool")


@dataclass(frozen=True)
class Program:
    """A function with specs of its arguments.

    Attributes:
      name: what tests call it.
      fn: the function.
      specs: a pytree of specs for each argument.
      casts: whether it holds casts to 16 bits, so that it is not all float32.
      unbatched: numbers of the arguments that vmap leaves alone.
    """

    name: str
    fn: Callable[..., Any]
    specs: tuple[Any, ...]
    casts: bool = False
    unbatched: tuple[int, ...] = ()

    def arguments(self, seed=0):
        """Arguments, the same ones for the same seed."""
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda spec: _draw(spec, rng),
            self.specs,
            is_leaf=lambda x: isinstance(x, Spec),
        )


def _draw(spec, rng):
    if spec.kind == "integer":
        values = rng.integers(spec.bound, size=spec.shape)
        return jax.device_put(values.astype(np.int32))
    if spec.kind == "bool":
        return jax.device_put(rng.random(spec.shape) < 0.7)
    values = np.asarray(rng.standard_normal(spec.shape))
    if spec.kind == "positive":
        values = 0.5 + np.abs(values)
    return jax.device_put(values.astype(np.float32))


def dense(p, x):
    return x @ p["w"] + p["b"]


def mlp(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(dense(layer, x))
    return dense(params[-1], x)


def residual(p, x):
    return x + jnp.tanh(dense(p, x))


def conv(x, w, b):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.tanh(y + b)


def max_pool(x, w):
    return lax.reduce_window(
        conv(x, w, jnp.zeros(w.shape[-1])),
        -jnp.inf,
        lax.max,
        (1, 2, 2, 1),
        (1, 2, 2, 1),
        "VALID",
    )


def attention(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(mask[:, None, None, :], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def library_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def gelu_by_hand(x, w):
    y = x @ w
    return 0.5 * y * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


def softmax_by_hand(x, w):
    y = x @ w
    y = jnp.exp(y - y.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


def layer_norm_by_hand(x, w, scale, bias):
    y = x @ w
    centred = y - y.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-6) * scale + bias


def library_activations(x, w):
    y = x @ w
    return {
        "gelu": jax.nn.gelu(y),
        "silu": jax.nn.silu(y),
        "elu": jax.nn.elu(y),
        "softplus": jax.nn.softplus(y),
        "log_softmax": jax.nn.log_softmax(y),
    }


def masked_mean(x, w, keep):
    y = jnp.where(keep, x @ w, 0.0)
    return y.sum(-1) / jnp.maximum(keep.sum(-1), 1)


def embedding(table, tokens, w):
    return table[tokens] @ w


def scatter_add(x, w, rows):
    return jnp.zeros((5, w.shape[1])).at[rows].add(x @ w)


def sort_and_argmax(x, w):
    y = x @ w
    return jnp.sort(y, -1), jnp.argmax(y, -1), lax.top_k(y, 2)[0]


def running_sums(x, w):
    return jnp.cumsum(x @ w, axis=0), jnp.cumprod(jnp.tanh(x @ w), axis=-1)


def concatenated(x, w, y):
    return jnp.concatenate([x @ w, y], axis=-1).reshape(-1)


def split_and_gate(x, w):
    left, right = jnp.split(x @ w, 2, axis=-1)
    return left * jax.nn.sigmoid(right)


def tree_in_tree_out(batch):
    y = batch["x"] @ batch["weights"]["w"]
    return {"y": y, "count": batch["n"] + 1, "aux": [jnp.sum(y), batch["keep"]]}


_CONSTANT = np.linspace(-1, 1, 6, dtype=np.float32)


def closed_over_constant(x, w):
    return (x @ w) * _CONSTANT + jnp.arange(6) / 6


@jax.jit
def _block(x, w):
    return jnp.tanh(x @ w)


def jitted_helper(x, w):
    return _block(_block(_block(x, w), w), w.T)


@jax.custom_jvp
def _cube(x):
    return x * x * x


@_cube.defjvp
def _cube_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _cube(x), 3 * x * x * t


def own_custom_jvp(x, w):
    return _cube(jnp.tanh(x @ w))


def keepdims(x, w):
    y = x @ w
    return (y - jnp.mean(y, 0, keepdims=True)) / (jnp.std(y, 0, keepdims=True) + 0.1)


def scalars(x, w, scale, shift):
    return (x @ w) * scale + shift


def powers_and_roots(x, w):
    y = jnp.abs(x @ w) + 0.5
    return jnp.sqrt(y) + y**2.5 + 1 / y + jnp.log(y)


def integers_only(n, keep):
    return jnp.where(keep, n * 2, n), jnp.sum(keep), n % 3 == 1


def cast_by_user(x, w):
    y = (x @ w).astype(jnp.bfloat16)
    return y, y.astype(jnp.float32) * 2


def bilinear(x, w, y):
    return jnp.einsum("bi,ijk,bj->bk", x, w, y)


def clipped(x, w):
    return jnp.clip(x @ w, -0.5, 0.5), jnp.maximum(x @ w, 0), jnp.sign(x @ w)


def updated_slice(x, w):
    return lax.dynamic_update_slice(x, x[:2] @ w, (1, 0))


def pairwise_loss(x, w):
    y = x @ w
    return jnp.mean((y[:, None] - y[None, :]) ** 2)


def classification_loss(params, x, labels):
    logits = mlp(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def regression_loss(p, x, y):
    return optax.huber_loss(dense(p, x), y).sum()


class Network(nn.Module):
    """Dense layers with normalisation between them."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.gelu(nn.Dense(8)(x)))
        return nn.Dense(3)(x)


class Convolutional(nn.Module):
    """A convolution with BatchNorm, in evaluation mode."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        return nn.Dense(2)(x.mean((1, 2)))


def linen_network(params, x):
    return Network().apply({"params": params}, x)


def linen_convolutional(params, stats, x):
    return Convolutional().apply({"params": params, "batch_stats": stats}, x)


_LINEAR = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
_NORM = nnx.LayerNorm(4, rngs=nnx.Rngs(0))


def nnx_layers(x):
    return jax.nn.relu(_NORM(_LINEAR(x)))


LAYER = {"w": f(6, 6), "b": f(6)}
LAYERS = [LAYER, LAYER, {"w": f(6, 3), "b": f(3)}]
HEADS = f(2, 5, 2, 4)
NETWORK = {
    "Dense_0": {"kernel": f(6, 8), "bias": f(8)},
    "LayerNorm_0": {"scale": f(8), "bias": f(8)},
    "Dense_1": {"kernel": f(8, 3), "bias": f(3)},
}
CONVOLUTIONAL = {
    "Conv_0": {"kernel": f(3, 3, 2, 4), "bias": f(4)},
    "BatchNorm_0": {"scale": f(4), "bias": f(4)},
    "Dense_0": {"kernel": f(4, 2), "bias": f(2)},
}
STATISTICS = {"BatchNorm_0": {"mean": f(4), "var": positive(4)}}

PROGRAMS = (
    Program("dense", dense, (LAYER, f(4, 6))),
    Program("mlp", mlp, (LAYERS, f(4, 6))),
    Program("residual", residual, (LAYER, f(4, 6))),
    Program("conv", conv, (f(2, 5, 5, 3), f(3, 3, 3, 4), f(4))),
    Program("max_pool", max_pool, (f(2, 4, 4, 3), f(3, 3, 3, 4))),
    Program("attention", attention, (HEADS, HEADS, HEADS, boolean(2, 5))),
    Program("library_attention", library_attention, (HEADS, HEADS, HEADS)),
    Program("gelu_by_hand", gelu_by_hand, (f(4, 6), f(6, 8))),
    Program("softmax_by_hand", softmax_by_hand, (f(4, 6), f(6, 8))),
    Program("layer_norm_by_hand", layer_norm_by_hand, (f(4, 6), f(6, 8), f(8), f(8))),
    Program("library_activations", library_activations, (f(4, 6), f(6, 8))),
    Program("masked_mean", masked_mean, (f(4, 6), f(6, 8), boolean(4, 8))),
    Program("embedding", embedding, (f(7, 6), integer(7, 4), f(6, 3))),
    Program("scatter_add", scatter_add, (f(4, 6), f(6, 3), integer(5, 4))),
    Program("sort_and_argmax", sort_and_argmax, (f(4, 6), f(6, 5))),
    Program("running_sums", running_sums, (f(4, 6), f(6, 3))),
    Program("concatenated", concatenated, (f(4, 6), f(6, 3), f(4, 2))),
    Program("split_and_gate", split_and_gate, (f(4, 6), f(6, 8))),
    Program(
        "tree_in_tree_out",
        tree_in_tree_out,
        (
            {
                "x": f(4, 6),
                "weights": {"w": f(6, 3)},
                "n": integer(9, 4),
                "keep": boolean(4),
            },
        ),
    ),
    Program("closed_over_constant", closed_over_constant, (f(4, 6), f(6, 6))),
    Program("jitted_helper", jitted_helper, (f(4, 6), f(6, 6))),
    Program("own_custom_jvp", own_custom_jvp, (f(4, 6), f(6, 3))),
    Program("keepdims", keepdims, (f(4, 6), f(6, 3))),
    Program("scalars", scalars, (f(4, 6), f(6, 3), f(), f()), unbatched=(2, 3)),
    Program("powers_and_roots", powers_and_roots, (f(4, 6), f(6, 3))),
    Program("integers_only", integers_only, (integer(9, 4), boolean(4))),
    Program("cast_by_user", cast_by_user, (f(4, 6), f(6, 3)), casts=True),
    Program("bilinear", bilinear, (f(4, 6), f(6, 5, 3), f(4, 5))),
    Program("clipped", clipped, (f(4, 6), f(6, 3))),
    Program("updated_slice", updated_slice, (f(4, 6), f(6, 6))),
    Program("pairwise_loss", pairwise_loss, (f(4, 6), f(6, 3))),
    Program(
        "classification_loss", classification_loss, (LAYERS, f(4, 6), integer(3, 4))
    ),
    Program("regression_loss", regression_loss, (LAYER, f(4, 6), f(4, 6))),
    Program("linen_network", linen_network, (NETWORK, f(4, 6))),
    Program(
        "linen_convolutional",
        linen_convolutional,
        (CONVOLUTIONAL, STATISTICS, f(2, 5, 5, 2)),
    ),
    Program("nnx_layers", nnx_layers, (f(4, 6),)),
)

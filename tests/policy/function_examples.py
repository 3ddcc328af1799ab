"""An example call for every function that a built-in policy names.

`EXAMPLES` maps a dotted name to a call: a function and its arguments, parameters of
layers among them, so that nothing is a constant of the traced program.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.scipy.stats
import numpy as np
import optax  # noqa: F401 - policies recognise functions of imported modules only
from flax import nnx

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def _ones(*shape):
    return np.ones(shape, np.float32)


X = _ones(4, 8)
IMAGE = _ones(2, 6, 6, 4)
SQUARE = np.eye(4, dtype=np.float32)
LABELS = np.zeros(4, np.int32)
CARRY = _ones(4, 6)
_PIVOTS = np.arange(4, dtype=np.int32)
_KEY = np.zeros(2, np.uint32)
_LOGITS = (_ones(2, 10, 6), _ones(2, 10), np.ones((2, 4), np.int32), _ones(2, 4))


def _resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# Functions called as they are, by their arguments.
_PLAIN: list[tuple[tuple[Any, ...], str]] = [
    (
        (X,),
        """
        jax.nn.celu jax.nn.elu jax.nn.gelu jax.nn.glu jax.nn.hard_sigmoid
        jax.nn.hard_silu jax.nn.log_sigmoid jax.nn.log_softmax jax.nn.logsumexp
        jax.nn.mish jax.nn.selu jax.nn.silu jax.nn.softmax jax.nn.softplus
        jax.nn.squareplus jax.nn.standardize jax.scipy.special.entr
        jax.scipy.special.i0 jax.scipy.special.i1 jax.scipy.special.log_ndtr
        jax.scipy.special.logsumexp
        jax.numpy.average jax.numpy.cumprod jax.numpy.cumsum jax.numpy.mean
        jax.numpy.median jax.numpy.nanmedian
        jax.numpy.nancumprod jax.numpy.nancumsum jax.numpy.nanmean jax.numpy.nanprod
        jax.numpy.nanstd jax.numpy.nansum jax.numpy.nanvar jax.numpy.prod
        jax.numpy.sinc jax.numpy.std jax.numpy.sum jax.numpy.trace jax.numpy.var
        jax.numpy.fft.hfft jax.numpy.fft.irfft
        jax.numpy.fft.irfft2 jax.numpy.fft.irfftn jax.numpy.linalg.matrix_norm
        jax.numpy.linalg.norm jax.numpy.linalg.vector_norm optax.global_norm
        optax.tree.norm
        """,
    ),
    ((_ones(8),), "jax.numpy.vander"),
    (
        (X, X),
        """
        jax.numpy.hypot jax.scipy.special.kl_div jax.scipy.special.owens_t
        jax.scipy.special.rel_entr jax.scipy.special.xlog1py jax.scipy.special.xlogy
        """,
    ),
    ((X / 4,), "jax.scipy.special.logit jax.scipy.special.ndtri"),
    ((X + 4, 2), "jax.scipy.special.multigammaln"),
    ((_ones(600),), "jax.scipy.signal.stft"),
    (
        (X, X[0], np.eye(8, dtype=np.float32)),
        "jax.scipy.stats.multivariate_normal.logpdf",
    ),
    ((X, 0.5), "jax.numpy.nanquantile jax.numpy.quantile"),
    ((X, X.T, 1), "jax.numpy.tensordot"),
    (
        (SQUARE,),
        """
        jax.numpy.linalg.cholesky jax.numpy.linalg.cond jax.numpy.linalg.det
        jax.numpy.linalg.eigvalsh jax.numpy.linalg.inv jax.numpy.linalg.matrix_rank
        jax.numpy.linalg.pinv jax.numpy.linalg.qr jax.numpy.linalg.slogdet
        jax.numpy.linalg.svd jax.numpy.linalg.svdvals jax.scipy.linalg.expm
        jax.scipy.linalg.lu
        """,
    ),
    (
        (SQUARE, X),
        """
        jax.numpy.linalg.lstsq jax.numpy.linalg.solve
        jax.scipy.linalg.solve_triangular
        """,
    ),
    ((jnp.add, X), "jax.lax.associative_scan"),
    (((SQUARE, True), X), "jax.scipy.linalg.cho_solve"),
    (((SQUARE, _PIVOTS), X), "jax.scipy.linalg.lu_solve"),
    (
        (X, X),
        """
        optax.losses.convex_kl_divergence optax.losses.cosine_distance
        optax.losses.cosine_similarity optax.losses.generalized_kl_divergence
        optax.losses.hinge_loss
        optax.losses.huber_loss optax.losses.kl_divergence
        optax.losses.binary_dice_loss optax.losses.dice_loss
        optax.losses.kl_divergence_with_log_targets optax.losses.l2_loss
        optax.losses.multiclass_generalized_dice_loss optax.losses.perceptron_loss
        optax.losses.ranking_softmax_loss optax.losses.safe_softmax_cross_entropy
        optax.losses.sparsemax_loss
        optax.losses.log_cosh optax.losses.poly_loss_cross_entropy
        optax.losses.sigmoid_binary_cross_entropy optax.losses.sigmoid_focal_loss
        optax.losses.softmax_cross_entropy optax.losses.squared_error
        """,
    ),
    ((X, X, X), "optax.losses.triplet_margin_loss"),
    (
        (X, LABELS),
        """
        optax.losses.multiclass_hinge_loss optax.losses.multiclass_perceptron_loss
        optax.losses.multiclass_sparsemax_loss optax.losses.ntxent
        optax.losses.softmax_cross_entropy_with_integer_labels
        """,
    ),
    (
        (_KEY,),
        """
        jax.random.cauchy jax.random.exponential jax.random.gumbel jax.random.laplace
        jax.random.logistic jax.random.maxwell jax.random.normal jax.random.uniform
        """,
    ),
    (
        (_KEY, 2.0),
        """
        jax.random.chisquare jax.random.generalized_normal jax.random.lognormal
        jax.random.pareto jax.random.rayleigh jax.random.t jax.random.wald
        """,
    ),
    ((_KEY, 0.5), "jax.random.bernoulli"),
    ((_KEY, 2.0, 2.0), "jax.random.beta jax.random.f jax.random.weibull_min"),
    ((_KEY, -1.0, 1.0), "jax.random.truncated_normal"),
    ((_KEY, _ones(3)), "jax.random.dirichlet"),
    (_LOGITS, "optax.losses.ctc_loss optax.losses.ctc_loss_with_forward_probs"),
]

_SCALE, _SHIFT = _ones(2), _ones(2)
_WITH_OPTIONS: dict[str, Call] = {
    "jax.random.ball": (partial(jax.random.ball, d=3), (_KEY,)),
    "jax.image.resize": (
        partial(jax.image.resize, shape=(2, 9, 9, 4), method="linear"),
        (IMAGE,),
    ),
    "jax.image.scale_and_translate": (
        lambda x, scale, shift: jax.image.scale_and_translate(
            x, (2, 9, 9, 4), (1, 2), scale, shift, "linear"
        ),
        (IMAGE, _SCALE, _SHIFT),
    ),
    "jax.lax.conv_general_dilated_patches": (
        partial(
            jax.lax.conv_general_dilated_patches,
            filter_shape=(3, 3),
            window_strides=(1, 1),
            padding="SAME",
        ),
        (IMAGE,),
    ),
    "jax.scipy.ndimage.map_coordinates": (
        lambda x, i, j: jax.scipy.ndimage.map_coordinates(x, [i, j], order=1),
        (X, _ones(5), _ones(5)),
    ),
}


def _filled(shapes):
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    return jax.device_put(ones)


def linen_call(module: nn.Module, *inputs: Any) -> Call:
    """A call of a linen module: (variables, *inputs) -> (outputs, new variables)."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)

    def call(variables, *inputs):
        return module.apply(variables, *inputs, mutable=["batch_stats"])

    return call, (_filled(shapes), *inputs)


def nnx_call(layer: Callable[..., Any], *inputs: Any) -> Call:
    """A call of an nnx layer: (state, *inputs) -> (outputs, new state).

    Args:
      layer: makes the layer, of `rngs` alone.
      *inputs: what the layer is called with.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0))))

    def call(state, *inputs):
        module = nnx.merge(graph, state)
        outputs = module(*inputs)
        return outputs, nnx.state(module)

    return call, (_filled(shapes), *inputs)


class _Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(6))(x, update_stats=True)


_PAIR = (CARRY, CARRY)
LAYERS: dict[str, Callable[[], Call]] = {
    "flax.linen.BatchNorm": lambda: linen_call(
        nn.BatchNorm(use_running_average=False), IMAGE
    ),
    "flax.linen.Conv": lambda: linen_call(nn.Conv(5, (3, 3)), IMAGE),
    "flax.linen.ConvTranspose": lambda: linen_call(nn.ConvTranspose(5, (3, 3)), IMAGE),
    "flax.linen.Dense": lambda: linen_call(nn.Dense(6), X),
    "flax.linen.DenseGeneral": lambda: linen_call(nn.DenseGeneral((2, 3)), X),
    "flax.linen.Einsum": lambda: linen_call(nn.Einsum((8, 6), "ab,bc->ac"), X),
    "flax.linen.Embed": lambda: linen_call(nn.Embed(10, 6), LABELS),
    "flax.linen.GRUCell": lambda: linen_call(nn.GRUCell(6), CARRY, X),
    "flax.linen.GroupNorm": lambda: linen_call(nn.GroupNorm(2), IMAGE),
    "flax.linen.InstanceNorm": lambda: linen_call(nn.InstanceNorm(), IMAGE),
    "flax.linen.LSTMCell": lambda: linen_call(nn.LSTMCell(6), _PAIR, X),
    "flax.linen.LayerNorm": lambda: linen_call(nn.LayerNorm(), X),
    "flax.linen.MGUCell": lambda: linen_call(nn.MGUCell(6), CARRY, X),
    "flax.linen.OptimizedLSTMCell": lambda: linen_call(
        nn.OptimizedLSTMCell(6), _PAIR, X
    ),
    "flax.linen.PReLU": lambda: linen_call(nn.PReLU(), X),
    "flax.linen.RMSNorm": lambda: linen_call(nn.RMSNorm(), X),
    "flax.linen.SimpleCell": lambda: linen_call(nn.SimpleCell(6), CARRY, X),
    "flax.nnx.BatchNorm": lambda: nnx_call(partial(nnx.BatchNorm, 4), IMAGE),
    "flax.nnx.Conv": lambda: nnx_call(partial(nnx.Conv, 4, 5, (3, 3)), IMAGE),
    "flax.nnx.ConvTranspose": lambda: nnx_call(
        partial(nnx.ConvTranspose, 4, 5, (3, 3)), IMAGE
    ),
    "flax.nnx.Einsum": lambda: nnx_call(
        partial(nnx.Einsum, "ab,bc->ac", (8, 6), (6,)), X
    ),
    "flax.nnx.Embed": lambda: nnx_call(partial(nnx.Embed, 10, 6), LABELS),
    "flax.nnx.GRUCell": lambda: nnx_call(partial(nnx.GRUCell, 8, 6), CARRY, X),
    "flax.nnx.GroupNorm": lambda: nnx_call(
        partial(nnx.GroupNorm, 4, num_groups=2), IMAGE
    ),
    "flax.nnx.InstanceNorm": lambda: nnx_call(partial(nnx.InstanceNorm, 4), IMAGE),
    "flax.nnx.LSTMCell": lambda: nnx_call(partial(nnx.LSTMCell, 8, 6), _PAIR, X),
    "flax.nnx.LayerNorm": lambda: nnx_call(partial(nnx.LayerNorm, 8), X),
    "flax.nnx.Linear": lambda: nnx_call(partial(nnx.Linear, 8, 6), X),
    "flax.nnx.LinearGeneral": lambda: nnx_call(
        partial(nnx.LinearGeneral, (8,), (2, 3)), X
    ),
    "flax.nnx.OptimizedLSTMCell": lambda: nnx_call(
        partial(nnx.OptimizedLSTMCell, 8, 6), _PAIR, X
    ),
    "flax.nnx.PReLU": lambda: nnx_call(lambda rngs: nnx.PReLU(), X),
    "flax.nnx.RMSNorm": lambda: nnx_call(partial(nnx.RMSNorm, 8), X),
    "flax.nnx.SimpleCell": lambda: nnx_call(partial(nnx.SimpleCell, 8, 6), CARRY, X),
}

# Made of listed layers and functions, and not listed themselves.
ATTENTION: dict[str, Callable[[], Call]] = {
    "flax.linen.MultiHeadDotProductAttention": lambda: linen_call(
        nn.MultiHeadDotProductAttention(num_heads=2), _ones(2, 6, 8)
    ),
    "flax.nnx.MultiHeadAttention": lambda: nnx_call(
        partial(nnx.MultiHeadAttention, 2, 8, 8, decode=False), _ones(2, 6, 8)
    ),
}

EXAMPLES: dict[str, Callable[[], Call]] = {
    **{
        name: lambda name=name, arguments=arguments: (_resolved(name), arguments)
        for arguments, names in _PLAIN
        for name in names.split()
    },
    **{name: lambda call=call: call for name, call in _WITH_OPTIONS.items()},
    **LAYERS,
    # Its product is that of the layer inside.
    "flax.linen.SpectralNorm._spectral_normalize": lambda: linen_call(
        _Spectral(), _ones(4, 8)
    ),
}

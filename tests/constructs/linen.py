"""Flax linen: layers, mutable collections, random numbers and lifted transforms."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._construct import Construct, images, matrix, normal, sequences


def call(name, module, *inputs, mutable=False, key=False, no_gradient="", **options):
    """The call of a module: its variables, random keys and inputs are arguments."""

    def arguments():
        made = tuple(make() for make in inputs)
        keys = {"dropout": jax.random.key(7)} if key else {}
        init = functools.partial(module.init, **options)
        variables = jax.jit(init)({"params": jax.random.key(0), **keys}, *made)
        variables.pop("intermediates", None)
        return variables, keys, *made

    def apply(variables, keys, *inputs):
        return module.apply(variables, *inputs, rngs=keys, mutable=mutable, **options)

    return Construct(f"linen_{name}", apply, arguments, no_gradient=no_gradient)


def videos():
    return normal(1, 2, 4, 4, 3)


def mask():
    return nn.make_causal_mask(jnp.ones((2, 5)))


def tokens():
    return jnp.array([[1, 5, 2, 0], [3, 3, 4, 6]])


class Residual(nn.Module):
    """A layer that can be stacked: what comes out has the shape of what came in."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(4)(nn.LayerNorm()(x))), None


class Layers(nn.Module):
    """The same layer several times, by a scan over stacked parameters."""

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Residual, prevent_cse=False)
        stacked = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return stacked()(x, None)[0]


class OverTime(nn.Module):
    """A scan over time by a cell that is a module, with its parameters shared."""

    @nn.compact
    def __call__(self, x):
        def step(cell, carry, row):
            carry = jnp.tanh(cell(jnp.concatenate([carry, row], -1)))
            return carry, carry.sum(-1)

        scanned = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        return scanned(nn.Dense(4), jnp.zeros((2, 4)), x)


class ConvBlock(nn.Module):
    """Convolution, BatchNorm in training and pooling."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        x = nn.max_pool(nn.relu(x), (2, 2))
        return nn.Dense(2)(nn.avg_pool(x, (2, 2)).reshape(x.shape[0], -1))


class Ensemble(nn.Module):
    """Several copies of a layer, by vmap over their parameters."""

    @nn.compact
    def __call__(self, x):
        copies = nn.vmap(
            nn.Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
        )
        return copies(4)(x)


class Branches(nn.Module):
    """A conditional or a switch between layers."""

    several: bool

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(4), nn.Dense(4, use_bias=False), lambda x: 2 * x]
        if self.is_initializing():
            for layer in layers:
                layer(x)
        paths = [lambda _, x, layer=layer: layer(x) for layer in layers]
        if self.several:
            return nn.switch(jnp.argmax(x[0, :3]), paths, self, x)
        return nn.cond(x[0, 0] > 0, paths[0], paths[1], self, x)


class Loop(nn.Module):
    """A while loop that calls a layer."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4)
        if self.is_initializing():
            return layer(x)
        step = lambda _, carry: (carry[0] + 1, jnp.tanh(layer(carry[1])))  # noqa: E731
        return nn.while_loop(lambda _, carry: carry[0] < 3, step, self, (0, x))[1]


class Dropped(nn.Module):
    """Dropout between two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x)))


class DroppedInScan(nn.Module):
    """Layers with dropout, checkpointed and stacked by a scan."""

    @nn.compact
    def __call__(self, x):
        step = lambda layer, x, _: (jnp.tanh(layer(x)), None)  # noqa: E731
        stacked = nn.scan(
            nn.remat(step, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        return stacked(Dropped(), x, None)[0]


class Masked(nn.Module):
    """Causal attention with dropout of its weights."""

    @nn.compact
    def __call__(self, x, mask):
        return attention(dropout_rate=0.3, deterministic=False)(x, mask=mask)


class Normed(nn.Module):
    """A layer with BatchNorm in training."""

    @nn.compact
    def __call__(self, x, _):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return jnp.tanh(nn.Dense(4)(x)), None


class NormsInScan(nn.Module):
    """Layers stacked by a scan, the statistics of their BatchNorms too."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "batch_stats": 0}
        rngs = {"params": True}
        stacked = nn.scan(Normed, variable_axes=axes, split_rngs=rngs, length=2)
        return stacked()(x, None)[0]


class Language(nn.Module):
    """An embedding whose table is the weight of the last layer too."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 4)
        return embed.attend(nn.RMSNorm()(nn.Dense(4)(embed(tokens))))


class Tied(nn.Module):
    """A layer called twice, the second time with its kernel transposed."""

    @nn.compact
    def __call__(self, x):
        def transposed(variables):
            return jax.tree.map(jnp.transpose, variables)

        layer = nn.Dense(4, use_bias=False)
        turned = nn.map_variables(
            lambda layer, x: layer(x), "params", trans_in_fn=transposed
        )
        return turned(layer, jnp.tanh(layer(x)))


class Sown(nn.Module):
    """What a layer computes is kept as an intermediate."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(2)(jnp.tanh(x))


class Bottleneck(nn.Module):
    """Norms between layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.GroupNorm(num_groups=2)(nn.Dense(4)(x))
        x = nn.RMSNorm()(nn.Dense(4)(nn.silu(x)))
        return nn.LayerNorm()(nn.Dense(4)(x) + x)


class OwnGradient(nn.Module):
    """A layer with a backward pass of its own, which doubles the gradient."""

    @nn.compact
    def __call__(self, x):
        def forward(layer, x):
            return nn.vjp(lambda layer, x: layer(x), layer, x)

        def backward(pull, g):
            gradients, g = pull(g)
            return jax.tree.map(lambda leaf: 2 * leaf, gradients), g

        layer = nn.custom_vjp(lambda layer, x: layer(x), forward, backward)
        return jnp.tanh(layer(nn.Dense(4), x))


class GradientInside(nn.Module):
    """A step of gradient descent on the input, inside the module."""

    @nn.compact
    def __call__(self, x):
        energy = nn.Dense(4)

        def total(energy, x):
            return jnp.sum(jnp.tanh(energy(x)) ** 2)

        _, pull = nn.vjp(total, energy, x)
        return x - 0.1 * pull(jnp.ones(()))[1]


def partitioned():
    initializer = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    return nn.Dense(4, kernel_init=initializer)


def bidirectional():
    forward, backward = nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))
    return nn.Bidirectional(forward, backward)


def attention(**options):
    return nn.MultiHeadDotProductAttention(num_heads=2, **options)


def decode(variables, tokens):
    """Three tokens one by one, the cache handed from call to call."""
    outputs = []
    for i in range(3):
        y, cache = DECODER.apply(variables, tokens[:, [i]], mutable=["cache"])
        variables = {**variables, **cache}
        outputs.append(y)
    return outputs, variables["cache"]


DECODER = attention(decode=True)


def decoding():
    return jax.jit(DECODER.init)(jax.random.key(0), sequences()), normal(
        2, 3, 4, seed=2
    )


CONSTRUCTS = (
    call("dense", nn.Dense(3), matrix),
    call("conv", nn.Conv(4, (3, 3), strides=2), images),
    call("conv_transposed", nn.ConvTranspose(4, (3, 3), strides=(2, 2)), images),
    call("conv_local", nn.ConvLocal(2, (3, 3)), images),
    call("remat_in_scan_over_layers", Layers(), matrix),
    call("scan_over_time", OverTime(), sequences),
    call("jit", nn.jit(Residual)(), matrix),
    call("vmap", Ensemble(), matrix),
    call("cond", Branches(several=False), matrix),
    call("switch", Branches(several=True), matrix),
    call("while_loop", Loop(), matrix, no_gradient="the length is not known"),
    call("batch_norm_in_training", ConvBlock(), images, mutable=["batch_stats"]),
    call("batch_norm_in_scan", NormsInScan(), matrix, mutable=["batch_stats"]),
    call("dropout_in_remat_in_scan", DroppedInScan(), matrix, key=True),
    call("lstm", nn.RNN(nn.LSTMCell(4)), sequences),
    call("conv_lstm", nn.RNN(nn.ConvLSTMCell(2, (3, 3))), videos),
    call("bidirectional", bidirectional(), sequences),
    call("attention_with_mask_and_dropout", Masked(), sequences, mask, key=True),
    Construct("linen_attention_decodes", decode, decoding),
    call("tied_embedding", Language(), tokens),
    call("tied_kernel", Tied(), matrix),
    call("norms", Bottleneck(), matrix),
    call("weight_norm", nn.WeightNorm(nn.Dense(4)), matrix),
    dataclasses.replace(
        call(
            "spectral_norm",
            nn.SpectralNorm(nn.Dense(4)),
            matrix,
            mutable=["batch_stats"],
            update_stats=True,
        ),
        kept=4,  # its power iteration
        kept_backward=6,
    ),
    call(
        "captured_intermediates",
        Sown(),
        matrix,
        mutable=["intermediates"],
        capture_intermediates=True,
    ),
    call("partitioned", partitioned(), matrix),
    call("custom_vjp", OwnGradient(), matrix),
    call("gradient_inside", GradientInside(), matrix),
)

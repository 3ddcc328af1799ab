"""Equinox: modules split into arrays and the rest, and its filtered transforms."""

import functools

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp

from ._construct import Construct, matrix, normal

KEYS = jax.random.split(jax.random.key(0), 4)


def call(name, make, fn, *inputs, no_gradient=""):
    """A function of a module: the module's arrays and the inputs are arguments."""

    @functools.cache
    def static():
        shapes = eqx.filter_eval_shape(make, KEYS[0])
        return eqx.filter(shapes, lambda x: not isinstance(x, jax.ShapeDtypeStruct))

    def arguments():
        return eqx.filter(make(KEYS[0]), eqx.is_array), *(make() for make in inputs)

    def run(params, *inputs):
        return fn(eqx.combine(params, static()), *inputs)

    return Construct(f"equinox_{name}", run, arguments, no_gradient=no_gradient)


def rows():
    return normal(3, 4)


def image():
    return normal(3, 5, 5)


def images():
    return normal(2, 3, 5, 5)


def key():
    return jax.random.key(3)


def mlp(key):
    return eqx.nn.MLP(4, 3, 6, depth=2, activation=jax.nn.gelu, key=key)


def linear(key):
    return eqx.nn.Linear(4, 4, key=key)


def batched(model, x):
    return jax.vmap(model)(x)


def convolutions(key):
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 4, 3, key=key),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2),
            eqx.nn.ConvTranspose2d(4, 2, 3, key=key),
        ]
    )


class Normed(eqx.Module):
    """A layer with BatchNorm, which counts on a vmap around it."""

    layer: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        # A bias before BatchNorm has no gradient but rounding.
        self.layer = eqx.nn.Conv2d(3, 4, 3, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch", momentum=0.5)

    def __call__(self, x, state):
        return self.norm(self.layer(x), state)


def with_state(pair, x):
    # A State may be used once; the copy leaves that of the arguments alone.
    model, state = jax.tree.map(lambda leaf: leaf, pair)
    vmapped = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    result, state = vmapped(x, state)
    return result, jax.tree.leaves(state)


class Recurrent(eqx.Module):
    """A cell run over time, and a layer on its last state."""

    cell: eqx.nn.GRUCell
    layer: eqx.nn.Linear

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(4, 4, key=key)
        self.layer = eqx.nn.Linear(4, 2, key=key)

    def __call__(self, xs):
        step = lambda state, x: (self.cell(x, state), state)  # noqa: E731
        state, states = jax.lax.scan(step, jnp.zeros(4), xs)
        return self.layer(state), states


def attention(key):
    return eqx.nn.MultiheadAttention(2, 4, dropout_p=0.3, key=key)


def attend(model, x, key):
    return model(x, x, x, mask=jnp.tril(jnp.ones((4, 4), bool)), key=key)


class Norms(eqx.Module):
    """A layer between norms, and dropout."""

    layer: eqx.nn.WeightNorm
    norms: tuple

    def __init__(self, key):
        self.layer = eqx.nn.WeightNorm(eqx.nn.Linear(4, 4, key=key))
        self.norms = (eqx.nn.LayerNorm(4), eqx.nn.RMSNorm(4), eqx.nn.Dropout(0.5))

    def __call__(self, x, key):
        before, after, dropout = self.norms
        return jax.vmap(after)(
            dropout(jax.vmap(lambda x: self.layer(before(x)))(x), key=key)
        )


def stacked(key):
    return eqx.filter_vmap(linear)(jax.random.split(key, 3))


def over_layers(layers, x):
    params, static = eqx.partition(layers, eqx.is_array)

    def step(x, params):
        layer = eqx.combine(params, static)
        return eqx.filter_checkpoint(lambda layer, x: jnp.tanh(layer(x)))(
            layer, x
        ), None

    return jax.lax.scan(step, x[0], params)[0]


def checkpointed_loop(model, x):
    step = lambda s: (s[0] + 1, jnp.tanh(jax.vmap(model)(s[1])))  # noqa: E731
    return eqxi.while_loop(
        lambda s: s[0] < 3, step, (0, x), max_steps=4, kind="checkpointed"
    )[1]


@eqx.filter_custom_vjp
def doubled(operands):
    model, x = operands
    return jnp.tanh(jax.vmap(model)(x))


@doubled.def_fwd
def _doubled_forward(perturbed, operands):
    return doubled(operands), None


@doubled.def_bwd
def _doubled_backward(residuals, g, perturbed, operands):
    _, pull = eqx.filter_vjp(lambda operands: doubled.fn(operands), operands)
    return jax.tree.map(lambda leaf: 2 * leaf, pull(g)[0])


def total(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


def checked(model, x):
    y = jax.vmap(model)(x)
    return eqx.error_if(y, jnp.any(jnp.isnan(y)), "the result holds a NaN")


CONSTRUCTS = (
    call("mlp", mlp, batched, matrix),
    call("convolutions", convolutions, lambda model, x: model(x), image),
    call("batch_norm_state", eqx.nn.make_with_state(Normed), with_state, images),
    call("gru_in_scan", Recurrent, lambda model, x: model(x), matrix),
    call("attention_with_mask_and_dropout", attention, attend, matrix, key),
    call("norms_and_dropout", Norms, lambda model, x, key: model(x, key), matrix, key),
    call("filter_jit", mlp, eqx.filter_jit(batched), matrix),
    call("filter_vmap_of_models", stacked, eqx.filter_vmap(lambda m, x: m(x)), rows),
    call("filter_checkpoint_in_scan", stacked, over_layers, matrix),
    call("checkpointed_loop", linear, checkpointed_loop, matrix),
    call("filter_custom_vjp", linear, lambda m, x: doubled((m, x)), matrix),
    call("filter_grad_inside", mlp, eqx.filter_value_and_grad(total), matrix),
    call("error_if", linear, checked, matrix),
)

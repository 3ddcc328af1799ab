"""Models of Equinox and Haiku under autocast, where these are installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import dtypes, matmul_dtypes, traced
from test_flax import near

import jamp

LOW_PAIR = ("float16", "float16")
gpu = functools.partial(jamp.autocast, device_type="gpu")

X = jax.random.normal(jax.random.key(1), (8, 4))
Y = jnp.sin(X[:, :2])


@pytest.fixture(scope="module")
def eqx():
    return pytest.importorskip("equinox")


@pytest.fixture(scope="module")
def hk():
    return pytest.importorskip("haiku")


@pytest.fixture
def mlp(eqx):
    key = jax.random.key(0)
    return eqx.nn.MLP(4, 2, 8, depth=2, activation=jax.nn.gelu, key=key)


def batched(model, x):
    return jax.vmap(model)(x)


def loss(model, x, y):
    return jnp.mean((batched(model, x).astype(jnp.float32) - y) ** 2)


MODULE_CALLS = {
    "function": lambda model: jax.vmap(gpu(model))(X),
    "closure": lambda model: gpu(lambda x: jax.vmap(model)(x))(X),
    # A module holds leaves that are no arrays: its activation functions.
    "argument": lambda model: gpu(batched)(model, X),
    "method": lambda model: gpu(jax.vmap(model.__call__))(X),
    "partial": lambda model: gpu(functools.partial(batched, model))(X),
}


@pytest.mark.parametrize("call", MODULE_CALLS)
def test_an_equinox_module_computes_in_16_bits(mlp, call):
    run = MODULE_CALLS[call]
    assert set(matmul_dtypes(traced(lambda: run(mlp)))) == {LOW_PAIR}
    near(run(mlp).astype(jnp.float32), batched(mlp, X))


NAMELESS_CALLS = {
    "autocast": lambda loss: gpu(loss)(X),
    "value_and_grad": lambda loss: jamp.value_and_grad(loss)(
        jamp.GradScaler(init_scale=1.0).init(), X
    )[0],
}


@pytest.mark.parametrize("call", NAMELESS_CALLS)
def test_an_equinox_module_whose_name_is_lost_may_be_the_function(eqx, mlp, call):
    class Loss(eqx.Module):
        mlp: eqx.nn.MLP
        power: int = 2  # with a default, and not set: its name is no string in a jit

        def __init__(self):
            self.mlp = mlp

        def __call__(self, x):
            return jnp.mean(batched(self.mlp, x) ** self.power)

    found = eqx.filter_jit(NAMELESS_CALLS[call])(Loss())
    near(found.astype(jnp.float32), Loss()(X))


def test_an_equinox_module_as_a_result_is_a_module(eqx, mlp):
    halved = gpu(lambda model: jax.tree.map(_half, model))(mlp)
    assert isinstance(halved, eqx.nn.MLP)
    assert halved.layers[0].use_bias is True
    near(batched(halved, X), batched(jax.tree.map(_half, mlp), X))


def test_a_pullback_that_equinox_makes_inside_is_called_outside(eqx, mlp):
    def pullback(model):
        return eqx.filter_vjp(lambda model: batched(model, X), model)

    y, function = gpu(pullback)(mlp)
    assert y.dtype == "float16"
    expected, made = pullback(mlp)
    near(function(y), made(expected), 0.05)


def test_a_rule_of_equinox_that_refuses_perturbed_operands_has_a_gradient(eqx):
    @eqx.filter_custom_vjp
    def product(x, w):
        return x @ w

    product.def_fwd(lambda perturbed, x, w: (x @ w, None))
    product.def_bwd(lambda residuals, g, perturbed, x, w: g @ w.T)

    def total(x, w):
        return jnp.sum(product(x, w))

    w = jnp.arange(8.0).reshape(4, 2)
    near(jax.grad(gpu(total))(X, w), jax.grad(total)(X, w))
    with pytest.raises(RuntimeError, match="cannot be autodifferentiated"):
        jax.grad(gpu(total), argnums=1)(X, w)


def _half(leaf):
    return leaf / 2 if isinstance(leaf, jax.Array) else leaf


def test_filtered_transforms_of_equinox_stand_around_autocast(eqx, mlp):
    step = eqx.filter_jit(eqx.filter_value_and_grad(gpu(loss)))
    value, gradients = step(mlp, X, Y)
    near((value, gradients), eqx.filter_value_and_grad(loss)(mlp, X, Y), 0.05)
    assert set(jax.tree.leaves(dtypes(gradients))) == {"float32"}


def test_filtered_transforms_of_equinox_stand_inside_autocast(eqx, mlp):
    step = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    value, gradients = gpu(step, output_dtype=jnp.float32)(mlp, X, Y)
    near((value, gradients), step(mlp, X, Y), 0.05)


def test_gradients_of_a_scaled_loss_of_an_equinox_module_are_as_equinox_gives_them(
    eqx, mlp
):
    state = jamp.GradScaler(init_scale=8.0).init()
    value, gradients = jamp.value_and_grad(loss)(state, mlp, X, Y)
    wanted_value, wanted = eqx.filter_value_and_grad(loss)(mlp, X, Y)
    assert jax.tree.structure(gradients) == jax.tree.structure(wanted)
    wanted = jax.tree.map(lambda gradient: 8 * gradient, wanted)
    near((value, gradients), (wanted_value, wanted), 1e-5)
    of_both = jamp.value_and_grad(lambda x, model: loss(model, x, Y), argnums=(1, 0))
    _, (of_model, of_x) = of_both(state, X, mlp)
    near(of_model, gradients, 1e-5)
    assert of_x.shape == X.shape


def test_flags_numbers_and_keys_of_an_equinox_module_have_no_gradient(eqx):
    class Noisy(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        key: jax.Array
        eps: float = 1e-3

    def noisy_loss(model, x):
        drop = jax.vmap(lambda row: model.dropout(row, key=model.key))
        return jnp.sum(drop(jax.vmap(model.linear)(x)) ** 2) * (1 + model.eps)

    linear, key = eqx.nn.Linear(4, 2, key=jax.random.key(0)), jax.random.key(1)
    model = Noisy(linear, eqx.nn.Dropout(0.5), key)
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1), jamp.GradScaler(init_scale=8.0))
    params = eqx.filter(model, eqx.is_inexact_array)
    state = tx.init(params)
    value, gradients = jamp.value_and_grad(noisy_loss)(state, model, X)
    wanted_value, wanted = eqx.filter_value_and_grad(noisy_loss)(model, X)
    assert jax.tree.structure(gradients) == jax.tree.structure(wanted)
    wanted = jax.tree.map(lambda gradient: 8 * gradient, wanted)
    near((value, gradients), (wanted_value, wanted), 1e-5)
    assert not tx.update(gradients, state, params)[1].last_step_skipped


def test_an_equinox_module_is_trained_with_loss_scaling(eqx, mlp):
    tx = jamp.dynamic_loss_scaling(optax.adam(0.02))
    scaled_loss = jamp.value_and_grad(gpu(loss, dtype=jnp.float16))

    @eqx.filter_jit
    def step(model, state):
        value, gradients = scaled_loss(state, model, X, Y)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(gradients, state, params)
        return eqx.apply_updates(model, updates), state, value

    model, state, curve = mlp, tx.init(eqx.filter(mlp, eqx.is_inexact_array)), []
    for _ in range(10):
        model, state, value = step(model, state)
        curve.append(float(value))
    assert curve[-1] < curve[0] / 2
    assert not state.skipped_steps


def test_an_equinox_model_trains_like_float32(eqx, mlp):
    curves = []
    optimizer = optax.adam(0.02)
    for function in (loss, gpu(loss)):

        @eqx.filter_jit
        def step(model, state, function=function):
            value, gradients = eqx.filter_value_and_grad(function)(model, X, Y)
            updates, state = optimizer.update(gradients, state)
            return eqx.apply_updates(model, updates), state, value

        model, state, curve = mlp, optimizer.init(eqx.filter(mlp, eqx.is_array)), []
        for _ in range(10):
            model, state, value = step(model, state)
            curve.append(float(value))
        arrays = eqx.filter(model, eqx.is_array)
        assert set(jax.tree.leaves(dtypes(arrays))) == {"float32"}
        curves.append(curve)
    np.testing.assert_allclose(*curves, rtol=0.05)
    assert curves[1][-1] < 0.7 * curves[1][0]


def test_the_state_of_an_equinox_batch_norm_stays_float32(eqx):
    class Model(eqx.Module):
        layer: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.layer = eqx.nn.Linear(4, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.5)

        def __call__(self, x, state):
            return self.norm(self.layer(x), state)

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    expected = jax.tree.map(lambda leaf: leaf, state)

    def step(model, state, x):
        run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return run(x, state)

    for _ in range(3):
        result, state = gpu(step)(model, state, X)
        wanted, expected = step(model, expected, X)
    near(result.astype(jnp.float32), wanted)
    # Leaves: two states are never equal.
    near(jax.tree.leaves(state), jax.tree.leaves(expected), 5e-3)


def test_the_key_of_an_equinox_dropout_gives_the_same_mask(eqx):
    dropout = eqx.nn.Dropout(0.5)
    run = lambda x, key: dropout(x @ x.T, key=key)  # noqa: E731
    result = gpu(run)(X, jax.random.key(5))
    wanted = run(X, jax.random.key(5))
    np.testing.assert_array_equal(result == 0, wanted == 0)
    assert 0 < np.mean(wanted == 0) < 1


def haiku_model(hk, training):
    def forward(x):
        x = hk.Linear(8)(x)
        x = hk.BatchNorm(True, True, decay_rate=0.5)(x, is_training=training)
        if training:
            x = hk.dropout(hk.next_rng_key(), 0.25, x)
        return hk.Linear(2)(jax.nn.gelu(x))

    return hk.transform_with_state(forward)


def test_a_haiku_model_trains_like_float32(hk):
    model = haiku_model(hk, training=True)
    optimizer = optax.adam(0.02)
    curves = []
    for wrap in (lambda fn: fn, gpu):
        apply = wrap(model.apply)

        def squared(params, state, key, apply=apply):
            y, state = apply(params, state, key, X)
            return jnp.mean((y.astype(jnp.float32) - Y) ** 2), state

        @jax.jit
        def step(params, state, opt_state, key, squared=squared):
            (value, state), gradients = jax.value_and_grad(squared, has_aux=True)(
                params, state, key
            )
            updates, opt_state = optimizer.update(gradients, opt_state)
            return optax.apply_updates(params, updates), state, opt_state, value

        params, state = start = model.init(jax.random.key(0), X)
        opt_state, curve = optimizer.init(params), []
        for key in jax.random.split(jax.random.key(1), 10):
            params, state, opt_state, value = step(params, state, opt_state, key)
            curve.append(float(value))
        assert dtypes((params, state)) == dtypes(start)
        curves.append(curve)
    np.testing.assert_allclose(*curves, rtol=0.05)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_the_parameters_of_a_haiku_model_may_be_made_under_autocast(hk):
    model = haiku_model(hk, training=True)
    params, _ = gpu(model.init)(jax.random.key(0), X)
    near(params, model.init(jax.random.key(0), X)[0], 1e-3)


def test_the_jitted_apply_of_a_haiku_model_computes_in_16_bits(hk):
    model = haiku_model(hk, training=False)
    made = haiku_model(hk, training=True).init(jax.random.key(0), X)
    arguments = (*made, None, X)
    result, state = jax.jit(gpu(model.apply))(*arguments)
    wanted, expected = model.apply(*arguments)
    assert result.dtype == jnp.float16
    near(result.astype(jnp.float32), wanted)
    near(state, expected)
    assert set(matmul_dtypes(traced(gpu(model.apply), *arguments))) == {LOW_PAIR}

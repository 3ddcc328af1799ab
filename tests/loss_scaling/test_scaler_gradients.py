"""GradScaler's work on arrays: losses are scaled, gradients unscaled, steps taken."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import dtypes
from scaler_reference import (
    NON_FINITE,
    TINY,
    numpy_unscaled,
    places,
    poisoned,
    same,
    state_of,
)

import jamp
from jamp import GradScaler, ScalerError, ScalerTypeError
from jamp.pallas_kernels import all_finite, unscale_and_check

SCALED = [
    (jnp.float16(2.0), "float32"),
    (jnp.bfloat16(2.0), "float32"),
    (jnp.float8_e5m2(2.0), "float32"),
    (jnp.float32(2.0), "float32"),
    (np.float64(2.0), "float32"),
    (2.0, "float32"),
    (2, "float32"),
    (jnp.int32(2), "float32"),
    (jnp.array([2, 3]), "float32"),
    (True, "float32"),
    (jnp.array([2.0], jnp.float16), "float16"),
    (jnp.array([[2.0]], jnp.bfloat16), "bfloat16"),
    (jnp.array([2.0], jnp.float8_e4m3fn), "float8_e4m3fn"),
    (jnp.array([2.0], jnp.float32), "float32"),
    (jnp.array([2.0j], jnp.complex64), "complex64"),
]


@pytest.mark.parametrize(("loss", "dtype"), SCALED)
def test_a_scaled_loss_has_the_dtype_that_torch_gives_it(loss, dtype):
    scaler = GradScaler(init_scale=8.0)
    scaled = scaler.scale(scaler.init(), loss)
    wide = np.complex64 if dtype == "complex64" else np.float32
    assert scaled.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(scaled, wide), np.asarray(loss).astype(wide) * 8
    )


def test_a_scalar_float16_loss_does_not_overflow_and_a_vector_does():
    scaler = GradScaler()
    loss = {"scalar": jnp.float16(3.0), "vector": jnp.ones(1, jnp.float16)}
    scaled = jax.jit(scaler.scale)(scaler.init(), loss)
    assert scaled["scalar"] == 3 * 65536
    assert np.isinf(scaled["vector"]).all()


def test_float64_stays_with_x64():
    with jax.enable_x64(True):
        scaler = GradScaler(init_scale=3.0)
        scaled = scaler.scale(scaler.init(), jnp.array(1 / 3, jnp.float64))
        grads, found = scaler.unscale(scaler.init(), {"w": jnp.array([0.7, 1e300])})
        assert scaled.dtype == grads["w"].dtype == jnp.float64
        # torch multiplies float64 gradients by the float32 inverse.
        expected = np.array([0.7, 1e300]) * np.float64(np.float32(1 / 3))
        np.testing.assert_array_equal(grads["w"], expected)
        assert not found


def test_scale_keeps_the_structure():
    scaler = GradScaler(init_scale=2.0)
    tree = {"a": [1.0, (jnp.ones(2), None)], "b": (), "c": ({}, np.ones(3))}
    for scale in (scaler.scale, jax.jit(scaler.scale)):
        scaled = scale(scaler.init(), tree)
        assert jax.tree.structure(scaled) == jax.tree.structure(tree)
        assert all((leaf == 2.0).all() for leaf in jax.tree.leaves(scaled))


@pytest.mark.parametrize(
    "leaf",
    ["loss", b"loss", object(), math.sin, 1j, np.array("loss")],
    ids=["string", "bytes", "object", "function", "complex", "array_of_strings"],
)
def test_scale_refuses_what_is_no_number(leaf):
    scaler = GradScaler()
    with pytest.raises(ScalerTypeError, match="arrays or numbers"):
        scaler.scale(scaler.init(), [jnp.ones(()), leaf])
    with pytest.raises(ScalerTypeError, match="arrays or numbers"):
        scaler.scale(scaler.init(), jax.random.key(0))


def gradients():
    """Gradients of every kind that unscale takes."""
    return {
        "bfloat16": jnp.array([1.0, -7.0, 3.3], jnp.bfloat16),
        "float32": [jnp.array(1.7), jnp.array([[1.1, 7.0], [0.0, -3.0]])],
        "float8": jnp.array([1.5, -2.0], jnp.float8_e5m2),
        "complex": jnp.array([1.0 + 2.0j]),
        "int": jnp.array([3, 4]),
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "no_gradient": np.zeros(2, jax.dtypes.float0),
    }


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0, 0.07])
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_unscaling_multiplies_by_the_inverse_in_float32(scale, transform):
    grads = gradients()
    unscaled, found = transform(GradScaler().unscale)(state_of(scale), grads)
    assert dtypes(unscaled) == dtypes(grads)
    assert same(unscaled, jax.tree.map(lambda g: numpy_unscaled(g, scale), grads))
    assert (found.dtype, found.shape, bool(found)) == (jnp.bool_, (), False)


@pytest.mark.parametrize("value", NON_FINITE, ids=str)
def test_one_value_that_is_not_finite_is_found_anywhere(value):
    grads, state = gradients(), state_of(8.0)
    unscale = jax.jit(GradScaler().unscale)
    for place in places(grads):
        _, found = unscale(state, poisoned(grads, place, value))
        assert found, place
    assert len(places(grads)) == 11


def test_unscaling_is_mapped_with_a_scale_for_each():
    grads = {"a": jnp.ones((3, 2)), "b": jnp.array([1.0, jnp.nan, -3.0])}
    states = jax.vmap(lambda scale: state_of(1.0)._replace(scale=scale))(
        jnp.array([2.0, 4.0, 2.0**-126])
    )
    unscaled, found = jax.jit(jax.vmap(GradScaler().unscale))(states, grads)
    assert unscaled["a"].tolist() == [[0.5] * 2, [0.25] * 2, [2.0**126] * 2]
    assert found.tolist() == [False, True, False]
    assert jax.vmap(GradScaler().unscale)(states, grads)[1].tolist() == found.tolist()


# Finite gradients whose unscaled values their dtype cannot hold.
OVERFLOWS = [
    (jnp.float32, 8.0, TINY),
    (jnp.float32, -8.0, TINY),
    (jnp.float32, 0.0, 0.0),
    (jnp.bfloat16, 8.0, TINY),
    # Finite in float32, and no longer once rounded to bfloat16.
    (jnp.bfloat16, 4.0625, 1.195e-38),
    (jnp.float8_e5m2, 1.0, 2.0**-16),
    (jnp.float8_e4m3fn, -1.0, 2.0**-9),
    (jnp.complex64, 8.0j, TINY),
]


@pytest.mark.parametrize(("dtype", "value", "scale"), OVERFLOWS)
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_an_overflow_that_unscaling_makes_is_found(dtype, value, scale, transform):
    unscale = transform(GradScaler(min_scale=None).unscale)
    unscaled, found = unscale(state_of(scale), [jnp.array([0, value], dtype)])
    assert not np.isfinite(np.asarray(unscaled[0], np.complex64)).all()
    assert found


@pytest.mark.parametrize("scale", [2.0**126, 2.0**127, 3e38, np.inf, np.nan])
def test_no_scale_is_too_large_to_notice(scale):
    grads, found = GradScaler().unscale(state_of(scale), jnp.array([2.0**100]))
    assert found or math.isclose(grads[0], 2.0**100 / scale, rel_tol=1e-6)
    assert not (found and scale <= 2.0**126)


@pytest.mark.parametrize("tree", [{}, None, [], jnp.array([1, 2]), jnp.zeros((0,))])
def test_without_gradients_nothing_is_found(tree):
    unscaled, found = jax.jit(GradScaler().unscale)(state_of(8.0), tree)
    assert same(unscaled, tree)
    assert not found


def test_float16_gradients_are_refused_by_name():
    half = jnp.ones(2, jnp.float16)
    grads = {"dense": {"kernel": half, "bias": jnp.ones(2)}, "scales": [half]}
    state = GradScaler().init()
    for unscale in (GradScaler().unscale, jax.jit(GradScaler().unscale)):
        with pytest.raises(ScalerError, match="Attempting to unscale FP16") as error:
            unscale(state, grads)
        assert "['dense']['kernel'], ['scales'][0] are" in str(error.value)
        assert "bias" not in str(error.value)


def test_of_many_float16_gradients_five_are_named():
    grads = [jnp.ones((), jnp.float16)] * 7
    with pytest.raises(ScalerError, match=r"at \[0\], .*\[4\] \.\.\. are float16"):
        GradScaler().unscale(GradScaler().init(), grads)


def test_kernels_refuse_an_unknown_implementation():
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        all_finite({}, implementation="cuda")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        unscale_and_check({}, 1.0, implementation="cuda")


def test_kernels_refuse_what_is_no_array():
    with pytest.raises(TypeError, match="a leaf of it is 'w'"):
        all_finite({"a": jnp.ones(2), "b": "w"})


def parameters():
    """Parameters with a leaf that is None and one that is empty."""
    return {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5), "n": None, "e": ()}


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.sgd(optax.linear_schedule(1.0, 0.0, 10)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_and_another_is_the_optimizers(name):
    tx, scaler, params = OPTIMIZERS[name], GradScaler(), parameters()
    opt_state = tx.init(params)
    step = jax.jit(lambda *args: scaler.step(scaler.init(), tx, *args))
    grads = jax.tree.map(lambda leaf: leaf * 0.3, params)
    new_params, new_state, stepped = step(grads, jnp.array(False), opt_state, params)
    updates, expected = jax.jit(tx.update)(grads, opt_state, params)
    expected = (optax.apply_updates(params, updates), expected)
    assert stepped
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        (new_params, new_state),
        expected,
    )
    grads["w"] = grads["w"] * jnp.nan
    *unchanged, stepped = step(grads, jnp.array(True), new_state, new_params)
    assert not stepped
    assert same(unchanged, [new_params, new_state])


@pytest.mark.parametrize("flags", [[True, False], {"a": [False], "b": True}])
def test_a_step_is_skipped_for_one_flag_of_several(flags):
    tx, params, scaler = optax.sgd(1.0), jnp.ones(2), GradScaler()
    flags = jax.tree.map(jnp.array, flags)
    arguments = (scaler.init(), tx, params, flags, tx.init(params), params)
    after, _, stepped = scaler.step(*arguments)
    assert (after.tolist(), stepped.shape, bool(stepped)) == ([1.0, 1.0], (), False)


def test_a_step_needs_a_flag():
    tx, params, scaler = optax.sgd(1.0), jnp.ones(2), GradScaler()
    with pytest.raises(ScalerError, match="No inf checks were recorded prior to step"):
        scaler.step(scaler.init(), tx, params, None, tx.init(params), params)


def test_a_step_passes_further_arguments_on():
    tx, params, scaler = optax.polyak_sgd(), jnp.array([3.0]), GradScaler()
    arguments = (params, jnp.array(False), tx.init(params), params)
    after, *_ = scaler.step(scaler.init(), tx, *arguments, value=jnp.array(1.8))
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.array(1.8))
    assert same(after, optax.apply_updates(params, updates))


def test_a_step_refuses_an_optimizer_that_scales_itself():
    params, scaler = jnp.ones(2), GradScaler()
    tx = optax.chain(optax.identity(), jamp.dynamic_loss_scaling(optax.sgd(1.0)))
    with pytest.raises(ScalerError, match="hand step the inner optimizer"):
        scaler.step(scaler.init(), tx, params, False, tx.init(params), params)


def test_an_ensemble_skips_where_its_own_gradients_overflow():
    tx, scaler = optax.adam(0.1), GradScaler(init_scale=8.0)

    def train_step(state, params, opt_state, grads):
        grads, found = scaler.unscale(state, grads)
        stepped = scaler.step(state, tx, grads, found, opt_state, params)
        return scaler.update(state, found), *stepped

    params = jnp.arange(6.0).reshape(3, 2)
    grads = params.at[1, 0].set(jnp.inf)
    state = jax.vmap(lambda _: scaler.init())(params)
    opt_state = jax.vmap(tx.init)(params)
    arguments = (state, params, opt_state, grads)
    after = jax.jit(jax.vmap(train_step))(*arguments)
    assert after[0].scale.tolist() == [8.0, 4.0, 8.0]
    assert after[3].tolist() == [True, False, True]
    row = lambda tree: jax.tree.map(lambda leaf: leaf[1], tree)  # noqa: E731
    assert same(row(after[1:3]), row((params, opt_state)))
    single = jax.tree.map(lambda leaf: leaf[2], arguments)
    assert same(jax.tree.map(lambda leaf: leaf[2], after), jax.jit(train_step)(*single))


def tiny_loss(w, x):
    """A loss whose gradients vanish in float16, unless they are scaled."""
    return 1e-6 * jnp.mean((x @ w - x[:, :1]) ** 2)


def step_of_tx(loss_fn, w, x):
    tx = jamp.dynamic_loss_scaling(optax.sgd(1e3))
    opt_state = tx.init(w)
    _, grads = jamp.value_and_grad(loss_fn)(opt_state, w, x)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), jamp.loss_scale(opt_state)


def step_of_scaler(loss_fn, w, x):
    scaler, tx = GradScaler(growth_interval=1), optax.sgd(1e3)
    state = scaler.init()
    scaled = jax.grad(lambda w: scaler.scale(state, loss_fn(w, x)))(w)
    grads, found_inf = scaler.unscale(state, scaled)
    after, _, _ = scaler.step(state, tx, grads, found_inf, tx.init(w), w)
    return after, scaler.update(state, found_inf).scale


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("step", [step_of_tx, step_of_scaler])
def test_a_whole_step_under_autocast_is_one_with_the_loss_under_it(
    step, device_type, jit
):
    wrap = functools.partial(jamp.autocast, device_type=device_type, dtype=jnp.float16)
    w, x = jnp.linspace(0.1, 1.0, 12).reshape(4, 3), jnp.linspace(0.1, 1.0, 8)
    x = x.reshape(2, 4)
    whole, scale = jit(wrap(functools.partial(step, tiny_loss)))(w, x)
    expected, scale_after = jit(functools.partial(step, wrap(tiny_loss)))(w, x)
    assert whole.dtype == scale.dtype == jnp.float32
    # The step as a whole rounds the gradients of weights to 16 bits, as it is written.
    np.testing.assert_allclose(whole - w, expected - w, rtol=2**-10)
    assert scale == scale_after
    assert (whole != w).all()


def test_a_jit_around_value_and_grad_finds_the_arguments_that_it_names():
    def loss(w, x, mode, opt_state=None):
        assert mode == "mean"
        return jnp.mean(x @ w)

    w, state = jnp.ones((4, 4)), GradScaler().init()
    names = {"static_argnames": "mode", "donate_argnames": "w"}
    value, grads = jax.jit(jamp.value_and_grad(loss), **names)(
        state, w, jnp.ones((2, 4)), "mean"
    )
    assert value == 4.0
    assert grads.shape == (4, 4)
    assert w.is_deleted()


class Model:
    """What holds parameters, and is neither a pytree nor a module."""

    w = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("argument", "kind"), [(Model(), "Model"), ("train", "str"), ([len, "a"], "list")]
)
def test_what_holds_no_arrays_to_differentiate_at_is_refused(argument, kind):
    message = f"argument 0 of the loss, of type {kind}, holds no floating arrays"
    with pytest.raises(jamp.ScalerTypeError, match=message):
        jamp.value_and_grad(lambda model: jnp.sum(Model.w))(state_of(8.0), argument)


def test_a_loss_of_scaled_gradients_is_taken():
    w, state = jnp.array([1.0, 2.0]), state_of(8.0)

    def penalty(w):
        inner = jax.grad(lambda w: jamp.scale_loss(jnp.sum(w**3), state))(w)
        return jnp.sum((inner / 8) ** 2)

    value, grads = jamp.value_and_grad(penalty)(state, w)
    assert value == 9 + 144
    np.testing.assert_allclose(grads, 8 * 36 * w**3)


@pytest.mark.parametrize("argnums", ["w", None, 0.0, {0}])
def test_an_argument_to_differentiate_at_is_named_by_its_number(argnums):
    with pytest.raises(jamp.AutocastTypeError, match="argnums must be the number of"):
        jamp.value_and_grad(jnp.sum, argnums=argnums)


@pytest.mark.parametrize("argnums", [5, -2, (0, 1)])
def test_an_argument_to_differentiate_at_has_to_be_there(argnums):
    w = jnp.ones(2)
    state = jamp.dynamic_loss_scaling(optax.sgd(0.1)).init(w)
    message = "none of the 1 that the loss was given by position"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.value_and_grad(jnp.sum, argnums)(state, w)

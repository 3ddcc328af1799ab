"""What goes wrong in loss scaling says what, as soon as it can be told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scaler_reference import state_of

import jamp
from jamp import ScalerError, ScalerTypeError

W = jnp.array([1.0, 2.0])


def whole(w):
    return jnp.sum(w).astype(jnp.int32)


NOT_REAL = {
    "int32": whole,
    "bool": lambda w: jnp.all(w > 0),
    "complex64": lambda w: jnp.sum(w) * 1j,
}


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", NOT_REAL)
def test_a_loss_that_is_not_real_is_refused_as_jax_refuses_it(dtype, transform):
    loss = NOT_REAL[dtype]
    with pytest.raises(TypeError, match=f"real-valued .*{dtype}"):
        jax.value_and_grad(loss)(W)
    message = f"grad requires a real-valued loss, got {dtype}"
    with pytest.raises(ScalerTypeError, match=message):
        transform(jamp.value_and_grad(loss))(state_of(8.0), W)
    with_aux = jamp.value_and_grad(lambda w: (loss(w), w), has_aux=True)
    with pytest.raises(ScalerTypeError, match=message):
        transform(with_aux)(state_of(8.0), W)


def test_a_python_int_is_no_real_loss_and_a_python_float_is_one():
    with pytest.raises(ScalerTypeError, match="real-valued loss, got int32"):
        jamp.value_and_grad(lambda w: 3)(state_of(8.0), W)
    value, grads = jamp.value_and_grad(lambda w: 3.0)(state_of(8.0), W)
    assert value == 3.0
    np.testing.assert_array_equal(grads, [0.0, 0.0])


def test_a_holomorphic_loss_is_complex():
    z = jnp.array(1.0 + 2.0j)
    fn = jamp.value_and_grad(lambda z: z**2, holomorphic=True)
    value, grad = fn(state_of(8.0), z)
    np.testing.assert_allclose(value, z**2, rtol=1e-6)
    np.testing.assert_allclose(grad, 8 * 2 * z, rtol=1e-6)
    with pytest.raises(ScalerTypeError, match="got int32"):
        jamp.value_and_grad(lambda z: 3, holomorphic=True)(state_of(8.0), z)


def test_a_loss_that_is_a_tuple_asks_for_has_aux():
    with pytest.raises(ScalerTypeError, match="returned a tuple; pass has_aux=True"):
        jamp.value_and_grad(lambda w: (jnp.sum(w), w))(state_of(8.0), W)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w: w**2, r"a scalar, got an array of shape \(2,\): take its mean"),
        (lambda w: None, "returned None: it lacks a return"),
        (lambda w: {"loss": w[0]}, "a scalar, got dict"),
        (lambda w: [w[0]], "a scalar, got a list of 1"),
    ],
    ids=["vector", "none", "dict", "list"],
)
def test_a_loss_that_is_no_scalar_is_told_what_it_is(loss, message):
    with pytest.raises(ScalerTypeError, match=message):
        jamp.value_and_grad(loss)(state_of(8.0), W)


def test_a_stack_of_states_is_no_state_of_one_loss():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state_of(8.0))
    with pytest.raises(ScalerError, match=r"loss scales, of shape \(4,\), .* jax.pmap"):
        jamp.value_and_grad(jnp.sum)(states, W)
    with pytest.raises(ScalerError, match=r"loss scales, of shape \(4,\), .* jax.pmap"):
        jamp.metrics(states, W)
    assert jamp.metrics(states)["loss_scale"].shape == (4,)


def test_a_loss_that_is_none_is_not_scaled():
    with pytest.raises(ScalerTypeError, match="the loss must be a number, got None"):
        jamp.scale_loss(None, state_of(8.0))


def test_an_integer_to_differentiate_at_is_named():
    def loss(x, params):
        return jnp.sum(params["w"]) * params["n"] * x

    params = {"w": W, "n": jnp.array(3)}
    message = r"argument 1 of the loss at \['n'\] is int32, which has no gradient"
    with pytest.raises(ScalerTypeError, match=message):
        jamp.value_and_grad(loss, argnums=1)(state_of(8.0), 2.0, params)
    allowed = jamp.value_and_grad(loss, argnums=1, allow_int=True)
    _, grads = allowed(state_of(8.0), 2.0, params)
    np.testing.assert_array_equal(grads["w"], [48.0, 48.0])


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("dtype", r"jamp.autocast\(fn, dtype=...\)"),
        ("has_auxx", "did you mean 'has_aux'"),
        ("retain_graph", "not retain_graph$"),
    ],
)
def test_an_option_that_jax_lacks_is_refused_at_once(option, hint):
    with pytest.raises(ScalerTypeError, match=hint):
        jamp.value_and_grad(jnp.sum, **{option: True})


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_scaled_already_is_refused(has_aux):
    state = state_of(8.0)

    def scaled(w):
        loss = jamp.scale_loss(jnp.sum(w), state)
        return (loss, w) if has_aux else loss

    with pytest.raises(ScalerError, match="scaled already"):
        jamp.value_and_grad(scaled, has_aux=has_aux)(state, W)


def test_float16_gradients_of_float32_parameters_name_the_order_of_transforms():
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1))
    with pytest.raises(ScalerError, match="float16 and the parameters float32"):
        tx.update(W.astype(jnp.float16), tx.init(W), W)


def test_a_scaler_in_place_of_an_optimizer_says_what_makes_one():
    with pytest.raises(ScalerTypeError, match=r"is no optimizer.*dynamic_loss_scaling"):
        optax.chain(jamp.GradScaler(), optax.sgd(0.1)).init(W)


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (jnp.sum, "one array"),
        (lambda w: (w[0], w, w), "a tuple of 3"),
        (lambda w: {"loss": w[0]}, "dict"),
    ],
)
def test_has_aux_needs_a_pair(result, what):
    with pytest.raises(ScalerTypeError, match=rf"a pair \(loss, aux\), got {what}"):
        jamp.value_and_grad(result, has_aux=True)(state_of(8.0), W)


def test_the_state_left_out_is_asked_for():
    fn = jamp.value_and_grad(lambda w, x: jnp.sum(w * x))
    for call in (fn, jax.jit(fn)):
        with pytest.raises(
            ScalerError, match=r"in an array: .* first argument is opt_"
        ):
            call(W, W)
    with pytest.raises(ScalerError) as error:
        jamp.loss_scale(W)
    assert "first argument" not in str(error.value)


TX = jamp.dynamic_loss_scaling(optax.adam(0.1))
WRONG_STATES = {
    "of the inner optimizer": lambda: optax.adam(0.1).init(W),
    "of a scaler": lambda: state_of(8.0),
    "parameters, swapped with it": lambda: W,
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_update_refuses_a_state_that_init_did_not_return(name):
    state = WRONG_STATES[name]()
    kind = "an array" if state is W else f"a {type(state).__name__}"
    message = rf"state is {kind}, not .* tx.init\(params\)._replace\(inner_state="
    with pytest.raises(ScalerTypeError, match=message):
        TX.update(W, state, W)


def test_a_state_in_front_of_the_gradients_shows_the_order():
    with pytest.raises(ScalerTypeError, match=r"first: tx.update\(grads, opt_state"):
        TX.update(TX.init(W), W, W)


def test_update_goes_on_from_a_state_of_the_inner_optimizer_as_its_error_says():
    inner = optax.adam(0.1)
    _, inner_state = inner.update(W, inner.init(W), W)
    state = TX.init(W)._replace(inner_state=inner_state)
    updates, _ = TX.update(jamp.scale_loss(W, state), state, W)
    np.testing.assert_allclose(updates, inner.update(W, inner_state, W)[0], rtol=1e-6)


def test_a_dict_from_a_checkpoint_has_no_scale_and_the_error_says_how_to_restore():
    restored = TX.init(W)._asdict()
    restored["scaler_state"] = restored["scaler_state"]._asdict()
    with pytest.raises(ScalerError, match=r"in dict.* with tx.init\(params\) as its"):
        jamp.loss_scale(restored)
    with pytest.raises(
        ScalerTypeError, match=r"a dict.* with tx.init\(params\) as its"
    ):
        TX.update(W, restored, W)


@pytest.mark.parametrize("scaler", [2.0**10, {"init_scale": 8.0}])
def test_a_scaler_of_another_type_is_refused_at_once(scaler):
    message = f"scaler must be a jamp.GradScaler, .*; got {type(scaler).__name__}"
    with pytest.raises(ScalerTypeError, match=message):
        jamp.dynamic_loss_scaling(optax.sgd(0.1), scaler)


def test_options_of_the_scaler_are_given_to_the_scaler():
    way_out = r"\(inner, jamp.GradScaler\(init_scale=\.\.\., hysteresis=\.\.\.\)\)"
    with pytest.raises(ScalerTypeError, match=way_out):
        jamp.dynamic_loss_scaling(optax.sgd(0.1), init_scale=8.0, hysteresis=2)
    for wrong, hint in (("axes", "axis_name, not axes"), ("scalar", "mean 'scaler'")):
        with pytest.raises(ScalerTypeError, match=hint):
            jamp.dynamic_loss_scaling(optax.sgd(0.1), **{wrong: None})


def test_hyperparameters_are_injected_inside():
    around = optax.inject_hyperparams(jamp.dynamic_loss_scaling)(optax.sgd(0.1))
    with pytest.raises(ScalerTypeError, match="inject_hyperparams goes inside"):
        around.init(W)


GRADS = {
    "of another name": (
        {"v": W},
        r"only gradients have \(2,\) at \['v'\] and only par",
    ),
    "none": (None, r"only parameters have \(2,\) at \['w'\]; take them with jamp.val"),
    "more": ({"w": W, "b": W}, r"only gradients have \(2,\) at \['b'\]; take"),
    "of another shape": ({"w": jnp.ones(3)}, r"have \(3,\) at \['w'\] and only par"),
    "a string": ({"w": "a"}, r"the gradients at \['w'\] must be arrays, got str"),
}


@pytest.mark.parametrize("kind", GRADS)
def test_gradients_that_do_not_fit_the_parameters_are_told_apart(kind):
    grads, message = GRADS[kind]
    params = {"w": W}
    with pytest.raises(ScalerTypeError, match=message):
        TX.update(grads, TX.init(params), params)


PARTLY = {"w": W, "steps": jnp.array(3), "activation": jnp.tanh, "rate": 0.1}
GRADIENTS = {
    "arrays": (W, W),
    "with None": (PARTLY, PARTLY | {"steps": None, "activation": None, "rate": None}),
    "left out": (PARTLY, PARTLY | {"steps": None, "activation": {}, "rate": None}),
    "float0": ({"w": W, "n": 3}, {"w": W, "n": np.zeros((), jax.dtypes.float0)}),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_an_error_of_the_optimizer_itself_comes_through(kind):
    def update(updates, state, params=None):
        raise ValueError("of the optimizer")

    params, grads = GRADIENTS[kind]
    broken = optax.GradientTransformation(lambda params: (), update)
    tx = jamp.dynamic_loss_scaling(broken)
    with pytest.raises(ValueError, match="of the optimizer"):
        tx.update(grads, tx.init(params), params)


def test_swapped_arguments_of_the_functions_show_their_order():
    state = TX.init(W)
    with pytest.raises(ScalerError, match=r"first: scale_loss\(loss, opt_state\)"):
        jamp.scale_loss(state, W[0])
    with pytest.raises(ScalerError, match=r"comes first: metrics\(opt_state, grads\)"):
        jamp.metrics(W, state)
    with pytest.raises(ScalerTypeError, match="comes first, and by position: value_"):
        jamp.value_and_grad(jnp.sum)(a=W, opt_state=state)


HELD = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("inner", [1e-3, optax.sgd, jamp.GradScaler(), HELD])
def test_what_is_no_optimizer_is_refused_at_once(inner):
    message = f"inner must be an optax optimizer, got {type(inner).__name__}"
    hint = "call it, as in optax.adamw" if inner is optax.sgd else ""
    if isinstance(inner, jamp.GradScaler):
        hint = r"the optimizer comes first, dynamic_loss_scaling\(tx, scaler\)"
    with pytest.raises(ScalerTypeError, match=f"{message}.*{hint}"):
        jamp.dynamic_loss_scaling(inner)


def test_a_single_float16_array_has_no_path():
    half = W.astype(jnp.float16)
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1))
    with pytest.raises(ScalerError, match=r"^the parameters are float16: keep"):
        tx.init(half)
    with pytest.raises(ScalerError, match=r"^the parameters at \['a'\]\['b'\] are flo"):
        tx.init({"a": {"b": half}})
    with pytest.raises(ScalerError, match=r"not trained, .* optax.partition"):
        tx.init({"frozen": half, "trained": W})
    with pytest.raises(ScalerError, match="FP16 gradients: the gradients are float16"):
        jamp.GradScaler().unscale(state_of(8.0), half)


def test_what_stands_before_the_wrapper_in_a_chain_is_warned_of_at_the_users_line():
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, TX)
    nested = optax.chain(clip, optax.chain(TX, optax.scale(1.0)))
    masked = optax.chain(clip, optax.masked(TX, True))
    message = r"\(EmptyState\) sees scaled gradients"
    inside = {"opt_state": optax.chain(tx).init(W)}
    for state in (tx.init(W), inside, nested.init(W), masked.init(W)):
        with pytest.warns(jamp.JampWarning, match=message) as warned:
            jamp.value_and_grad(jnp.sum)(state, W)
        assert [warning.filename for warning in warned] == [__file__]


AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 1000),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_keeps_overflows_from_the_wrapper_is_warned_of_at_the_users_line(name):
    state = optax.chain(AROUND[name](TX)).init(W)
    with pytest.warns(jamp.JampWarning, match=f"{name} around .* wrap it") as warned:
        jamp.value_and_grad(jnp.sum)(state, W)
    assert [warning.filename for warning in warned] == [__file__]
    inside = jamp.dynamic_loss_scaling(AROUND[name](optax.sgd(0.1))).init(W)
    assert jamp.loss_scale(inside) == 2.0**16


def of_two_parts(other):
    tx = optax.partition({"scaled": TX, "other": other}, {"a": "scaled", "b": "other"})
    return tx.init({"a": W, "b": W})


def test_a_part_of_a_partition_alone_is_warned_of_at_the_users_line():
    state = of_two_parts(optax.sgd(0.1))
    with pytest.warns(jamp.JampWarning, match="leaves the gradients of the") as warned:
        jamp.value_and_grad(jnp.sum)(state, W)
    assert [warning.filename for warning in warned] == [__file__]


SOME = {"a": True, "b": False}
OTHERS = {"a": False, "b": True}
MOMENTUM = jamp.dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9))


def test_what_a_mask_around_the_wrapper_leaves_out_is_warned_of_at_the_users_line():
    state = optax.masked(MOMENTUM, SOME).init({"a": W, "b": W})
    with pytest.warns(
        jamp.JampWarning, match="the gradients that it leaves "
    ) as warned:
        jamp.value_and_grad(jnp.sum)(state, W)
    assert [warning.filename for warning in warned] == [__file__]


def with_frozen_parameters():
    frozen = optax.masked(optax.set_to_zero(), OTHERS)
    tx = optax.chain(optax.masked(MOMENTUM, SOME), frozen)
    return tx.init({"a": W, "b": W})


AFTER = {
    "after it": lambda: optax.chain(TX, optax.scale(0.5)).init(W),
    "in it": lambda: jamp.dynamic_loss_scaling(optax.chain(optax.clip(1.0))).init(W),
    "beside it": lambda: (W, TX.init(W)),
    "around it": lambda: optax.masked(TX, True).init(W),
    "beside what is frozen": lambda: of_two_parts(optax.set_to_zero()),
    "in a mask beside what is frozen": with_frozen_parameters,
    "in a mask of all, around another": lambda: optax.masked(
        jamp.dynamic_loss_scaling(optax.masked(optax.adam(0.1), SOME)), True
    ).init({"a": W, "b": W}),
    "around a mask": lambda: jamp.dynamic_loss_scaling(
        optax.masked(optax.adam(0.1), SOME)
    ).init({"a": W, "b": W}),
}


@pytest.mark.parametrize("place", AFTER)
def test_what_stands_elsewhere_is_not_warned_of(place):
    assert jamp.loss_scale(AFTER[place]()) == 2.0**16


def test_the_norm_tells_gradients_that_were_not_scaled():
    state = TX.init(W)
    for grads, norm in (
        (jamp.value_and_grad(jnp.sum)(state, W)[1], 2**0.5),
        (jax.grad(jnp.sum)(W), 2**0.5 / 2.0**16),
    ):
        found = jamp.metrics(state, grads)["grad_norm"]
        np.testing.assert_allclose(found, norm, rtol=1e-6)

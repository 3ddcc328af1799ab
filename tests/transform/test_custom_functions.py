"""custom_fwd and custom_bwd: functions that choose their own dtypes under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import matmul_dtypes, traced

import jamp

X = jax.random.normal(jax.random.key(0), (4, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))
FLOAT16, FLOAT32 = ("float16", "float16"), ("float32", "float32")


def product(cast_inputs, bwd_decorator=None):
    """x @ w with a custom_vjp; its gradients are twice the true ones."""
    own = {"cast_inputs": cast_inputs}

    @jax.custom_vjp
    @jamp.custom_fwd(**own)
    def fn(x, w):
        return x @ w

    @jamp.custom_fwd(**own)
    def fwd(x, w):
        return x @ w, (x, w)

    @(bwd_decorator or jamp.custom_bwd(**own))
    def bwd(residuals, g):
        x, w = residuals
        return 2 * (g @ w.T), 2 * (x.T @ g)

    fn.defvjp(fwd, bwd)
    return fn


def total(fn):
    return lambda *args: fn(*args).astype(jnp.float32).sum()


def on_gpu(fn):
    return jamp.autocast(fn, device_type="gpu")


@pytest.mark.parametrize(
    ("cast_inputs", "pair", "dtype"),
    [
        (None, FLOAT16, jnp.float16),
        (jnp.float32, FLOAT32, jnp.float32),
        (jnp.bfloat16, ("bfloat16", "bfloat16"), jnp.bfloat16),
    ],
)
def test_forward_and_backward_run_in_the_dtype_asked_for(cast_inputs, pair, dtype):
    fn = on_gpu(product(cast_inputs))
    assert fn(X, W).dtype == dtype
    gradient = jax.grad(total(fn), (0, 1))
    assert set(matmul_dtypes(traced(gradient, X, W))) == {pair}
    expected = jax.grad(total(lambda x, w: x @ w), (0, 1))(X, W)
    for actual, right in zip(gradient(X, W), expected, strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, 2 * right, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("decorator", "backward"),
    [
        (jamp.custom_bwd, FLOAT32),
        (jamp.custom_bwd(device_type="cuda"), FLOAT32),
        (lambda rule: rule, FLOAT16),
    ],
    ids=["bare", "with options", "none"],
)
def test_a_backward_rule_runs_as_its_forward_rule_if_it_is_decorated(
    decorator, backward
):
    fn = on_gpu(lambda x, w: product(jnp.float32, decorator)(x, w) * 200)
    x = jnp.full((4, 4), 300.0)
    gradient = jax.jit(jax.grad(total(fn), (0, 1)))
    products = matmul_dtypes(traced(gradient, x, W))
    assert sorted(products) == sorted([FLOAT32, backward, backward])
    expected = 2 * 200 * x.T @ jnp.ones((4, 4))
    # In 16 bits it overflows, as it would in PyTorch under autocast.
    finite = backward == FLOAT32
    assert bool(jnp.isfinite(gradient(x, W)[1]).all()) == finite
    if finite:
        np.testing.assert_allclose(gradient(x, W)[1], expected)


@pytest.mark.parametrize("cast_inputs", [None, jnp.float32])
@pytest.mark.parametrize("symbolic_zeros", [False, True])
@pytest.mark.parametrize("results", [lambda x: [x], lambda x: [2 * x, 3 * x]])
def test_a_backward_rule_runs_so_whatever_the_forward_rule_does(
    results, symbolic_zeros, cast_inputs
):
    own = jamp.custom_fwd(cast_inputs=cast_inputs)
    fn = jax.custom_vjp(own(lambda x, w: results(x)))

    @own
    def fwd(x, w):
        return results(getattr(x, "value", x)), getattr(w, "value", w)

    @jamp.custom_bwd
    def bwd(w, cotangents):
        return cotangents[0] @ w.T, None

    fn.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
    gradient = jax.grad(total(on_gpu(lambda x, w: fn(x, w)[0])))
    pair = FLOAT16 if cast_inputs is None else FLOAT32
    for _ in range(2):
        assert matmul_dtypes(traced(gradient, X, W)) == [pair]


def test_a_16_bit_argument_of_a_float32_function_gets_a_16_bit_gradient():
    fn = on_gpu(product(jnp.float32))
    narrow = X.astype(jnp.bfloat16)
    assert fn(narrow, W).dtype == jnp.float32
    gradients = jax.grad(total(fn), (0, 1))(narrow, W)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_a_16_bit_activation_is_widened():
    fn = on_gpu(lambda x, w: product(jnp.float32)(x @ w, w))
    assert fn(X, W).dtype == jnp.float32
    assert sorted(matmul_dtypes(traced(fn, X, W))) == [FLOAT16, FLOAT32]
    np.testing.assert_allclose(fn(X, W), X @ W @ W, rtol=0.02, atol=0.02)


def test_the_cast_of_the_backward_rule_holds_where_the_gradient_is_taken_inside():
    fn = on_gpu(jax.grad(total(product(jnp.float32)), (0, 1)))
    assert set(matmul_dtypes(traced(fn, X, W))) == {FLOAT32}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda fn: fn,
        lambda fn: jamp.autocast(fn, device_type="gpu", enabled=False),
        lambda fn: jamp.autocast(fn, device_type="cpu"),
    ],
    ids=["outside", "disabled", "other_device"],
)
def test_without_an_autocast_that_it_is_meant_for_it_casts_nothing(wrap):
    seen = []

    @jamp.custom_fwd(device_type="cuda", cast_inputs=jnp.float16)
    def fn(x):
        seen.append(x.dtype)
        return x + x

    wrap(fn)(X)
    assert seen == [jnp.float32]


def test_floating_arrays_are_cast_wherever_they_stand_and_nothing_else_is():
    seen = {}

    @jamp.custom_fwd(cast_inputs=jnp.float16)
    def fn(tree, *, mode, scale, count):
        seen.update(mode=mode, dtypes=jax.tree.map(lambda a: a.dtype, (tree, scale)))
        return tree["x"][0] * scale * count.astype(jnp.float16)

    result = on_gpu(fn)(
        {"x": [X, jnp.arange(3)], "y": None},
        mode="nearest",
        scale=np.float32(2),
        count=jnp.ones((), jnp.int32),
    )
    half, whole = np.dtype(np.float16), np.dtype(np.int32)
    assert seen == {
        "mode": "nearest",
        "dtypes": ({"x": [half, whole], "y": None}, half),
    }
    assert result.dtype == half


def test_float64_is_not_cast():
    with jax.enable_x64(True):
        fn = on_gpu(jamp.custom_fwd(lambda x: x + x, cast_inputs=jnp.float16))
        assert fn(jnp.ones(3, jnp.float64)).dtype == jnp.float64


def test_a_decorated_function_keeps_its_name():
    @jamp.custom_fwd(cast_inputs=jnp.float32)
    def named(x):
        """Documented."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "Documented.")


def test_a_decorated_module_does_not_hand_on_its_attributes():
    class Scaled:
        def __init__(self):
            self.factor = jnp.ones(3)

        def __call__(self, x):
            return x * self.factor

    assert not hasattr(jamp.custom_fwd(Scaled()), "factor")


@pytest.mark.parametrize("decorator", [jamp.custom_fwd, jamp.custom_bwd])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cast_inputs": jnp.int32}, jamp.AutocastTypeError, "floating dtype"),
        (
            {"cast_inputs": "halfish"},
            jamp.AutocastTypeError,
            "floating dtype, got .halfish",
        ),
        ({"device_type": "npu"}, jamp.AutocastError, "unknown device_type"),
        ({"device_type": 1}, jamp.AutocastTypeError, "must be a str"),
        ({"fn": 3}, jamp.AutocastTypeError, "takes a function, got int"),
        (
            {"fn": jax.custom_vjp(jnp.sin)},
            jamp.AutocastTypeError,
            "{0} takes .* put @jax.custom_vjp above @jamp.{0}",
        ),
    ],
)
def test_wrong_arguments_are_named(decorator, arguments, error, words):
    with pytest.raises(error, match=words.format(decorator.__name__)):
        decorator(**arguments)


@pytest.mark.parametrize("decorator", [jamp.custom_fwd, jamp.custom_bwd])
def test_a_wrong_device_type_is_named_beside_a_function(decorator):
    with pytest.raises(jamp.AutocastError, match="unknown device_type 'npu'"):
        decorator(jnp.sin, device_type="npu")

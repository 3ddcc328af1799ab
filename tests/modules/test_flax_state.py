"""State that modules keep from call to call has the dtypes that it had."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")

X = jax.random.normal(jax.random.key(1), (8, 4))


def near(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0.02, atol=2e-3)


class Remembering(nnx.Module):
    """Keeps what its last call computed."""

    def __init__(self):
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.SpectralNorm(layer, rngs=nnx.Rngs(0))
        self.last = nnx.Variable(jnp.zeros((8, 4)))
        self.queue = nnx.Cache(jnp.ones((12, 4)))
        self.number = nnx.Variable(jnp.zeros(()))
        self.pair = nnx.Variable((jnp.zeros((8, 4)), jnp.zeros(8, jnp.int32)))

    def __call__(self, x):
        h = self.norm(x) + self.last[...]
        self.last[...] = self.norm(x)
        self.queue[...] = jax.lax.dynamic_update_slice(self.queue[...], h, (3, 0))
        self.number[...] = 0.5
        self.pair.set_value((self.norm(x), jnp.argmax(h, axis=1)))
        self.made = nnx.Intermediate(self.norm(x))
        return h


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.float16])
def test_a_module_that_is_returned_is_itself(dtype):
    """With output_dtype too, of which its state is none."""
    model = Remembering()
    step = gpu(lambda model, x: (model, model(x)), output_dtype=dtype)
    returned, y = step(model, X)
    assert returned is model
    assert y.dtype == (dtype or jnp.float32)
    assert returned.last[...].dtype == jnp.float32


class Float32Norm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    @jamp.custom_fwd(cast_inputs=jnp.float32)
    def __call__(self, x):
        assert x.dtype == jnp.float32
        self.calls[...] += 1
        return self.norm(x)


def test_a_method_that_casts_its_arguments_keeps_its_modules_state():
    expected, model = Float32Norm(), Float32Norm()
    expected(X)
    gpu(lambda model, x: model(x.astype(jnp.float16)))(model, X)
    near(nnx.state(model), nnx.state(expected))


def test_a_variable_beside_what_is_differentiated_is_changed():
    counter = nnx.Variable(jnp.zeros(()))

    def loss(w, counter):
        counter[...] += 1
        return jnp.sum(w**2)

    state = jamp.GradScaler(init_scale=4.0).init()
    value, grads = jamp.value_and_grad(loss)(state, jnp.ones(3), counter)
    assert (value, counter[...]) == (3, 1)
    np.testing.assert_array_equal(grads, 8)


WAYS = {
    "eager": lambda model: gpu(lambda model: model(X))(model),
    "jit outside": lambda model: nnx.jit(gpu(lambda model: model(X)))(model),
    "remat inside": lambda model: gpu(nnx.remat(lambda model: model(X)))(model),
    "module itself": lambda model: gpu(model)(X),
}


@pytest.mark.parametrize("way", WAYS)
def test_state_keeps_the_dtypes_that_it_has(way):
    expected, model = Remembering(), Remembering()
    expected(X)
    WAYS[way](model)
    assert model.made[...].dtype == jnp.float16
    del model.made, expected.made
    near(nnx.state(model), nnx.state(expected))


def test_hijax_variables_may_be_read_under_jit():
    def fn(layer, x):
        return x @ layer.kernel[...] + layer.bias[...]

    with nnx.var_defaults(hijax=True):
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    actual = jax.jit(gpu(fn))(layer, X)
    assert actual.dtype == jnp.float16
    near(actual.astype(jnp.float32), fn(layer, X))


def test_state_that_products_computed_is_the_carry_of_a_scan():
    def epoch(model, of):
        def step(model, x):
            return model, nnx.value_and_grad(of)(model, x)[0]

        axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
        return nnx.scan(step, **axes)(model, jnp.stack([X, 2 * X]))[1]

    def mean(model, x):
        return jnp.mean(model.norm(x) ** 2)

    near(epoch(Remembering(), gpu(mean)), epoch(Remembering(), mean))


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
def test_the_state_of_linens_spectral_norm_stays_float32(device_type):
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.SpectralNorm(linen.Dense(4))(x, update_stats=True)

    variables = Normed().init(jax.random.key(0), X)
    apply = functools.partial(Normed().apply, mutable=["batch_stats"])
    y, state = jamp.autocast(apply, device_type=device_type)(variables, X)
    near(state, apply(variables, X)[1])
    assert y.dtype == {"gpu": jnp.float16, "cpu": jnp.bfloat16}[device_type]


class Stack(nnx.Module):
    """Its list has layers under numbers, and in a capture an attribute under a name."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
            self.sow(nnx.Intermediate, "outputs", x)
        return x


def test_a_capture_around_autocast_finds_what_modules_in_a_list_sow():
    model = Stack()
    result, captured = nnx.capture(gpu(Stack.__call__), nnx.Intermediate)(model, X)
    expected = nnx.capture(model, nnx.Intermediate)(X)
    assert result.dtype == jnp.float16
    assert [x.dtype for x in jax.tree.leaves(captured)] == [jnp.float16] * 2
    near(
        jax.tree.map(lambda x: x.astype(jnp.float32), (result, captured)),
        expected,
    )

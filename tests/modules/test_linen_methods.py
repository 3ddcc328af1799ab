"""Methods and layers of flax.linen inside a module: refused where they would leak."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
x22 = jnp.ones((2, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda model: model.apply,
        lambda model: functools.partial(model.apply),
        lambda model: jax.vmap(model.apply, (None, 0)),
    ],
    ids=["method", "partial", "vmap"],
)
def test_eager_calls_of_apply_trace_once(function):
    traces = []

    class Traced(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(x.shape)
            return nn.Dense(2)(x)

    model = Traced()
    parameters = model.init(jax.random.key(0), x22)
    traces.clear()
    fn = gpu(function(model))
    fn(parameters, x22), fn(parameters, x22)
    assert len(traces) == 1


class OverCompact(nn.Module):
    @jamp.autocast
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class UnderCompact(nn.Module):
    @nn.compact
    @jamp.autocast
    def __call__(self, x):
        return nn.Dense(2)(x)


class WithSetup(nn.Module):
    def setup(self):
        self.dense = nn.Dense(2)

    @jamp.autocast
    def __call__(self, x):
        return self.dense(x)


class AroundALayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jamp.autocast(nn.Dense(2))(x)


BOUND = [OverCompact, UnderCompact, WithSetup, AroundALayer]


@pytest.mark.parametrize("kind", BOUND)
def test_a_bound_linen_module_raises_and_says_what_to_wrap(kind):
    def init(x):
        return kind().init_with_output(jax.random.key(0), x)[0]

    with pytest.raises(jamp.AutocastTypeError, match="wrap the function that calls mo"):
        init(x22)
    # Inside a function under autocast it is a region like any other.
    if kind is not OverCompact:
        assert gpu(init)(x22).dtype == jnp.float16


@pytest.mark.parametrize("kind", [UnderCompact, WithSetup, AroundALayer])
def test_a_linen_module_that_only_reads_its_variables_is_no_error(kind):
    dense = {"kernel": x22, "bias": x22[0]}
    name = "dense" if kind is WithSetup else "Dense_0"
    variables = {"params": {name: dense}}
    result = kind().apply(variables, x22)
    assert result.dtype == jamp.get_autocast_dtype()
    np.testing.assert_array_equal(result, x22 @ x22 + 1)

"""Functions of other libraries have torch's dtypes, and float32's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW
from jaxprs import operand_dtypes, traced
from library_examples import INSTALLED, LIBRARY_EXAMPLES

import jamp

# torch's norms return float32 on CUDA and what came in on CPUs; so do its densities,
# which begin with a power or a logarithm.
AS_INPUT = {
    "equinox.nn.BatchNorm",
    "haiku.BatchNorm",
    "transformers.models.gemma.modeling_flax_gemma.FlaxGemmaRMSNorm",
}
# torch's CPU list has none: there, a bias of the sum of two products promotes.
CELLS = """
    equinox.nn.GRUCell equinox.nn.LSTMCell haiku.GRU haiku.LSTM haiku.VanillaRNN
""".split()
# A weight, or state, of the same rank promotes, and what a constructor makes.
FLOAT32 = """
    equinox.nn.LSTMCell haiku.GRU
    haiku.ExponentialMovingAverage haiku.SpectralNorm
    transformers.models.llama.modeling_flax_llama.FlaxLlamaRMSNorm
    transformers.models.longt5.modeling_flax_longt5.FlaxLongT5LayerNorm
    transformers.models.mistral.modeling_flax_mistral.FlaxMistralRMSNorm
    transformers.models.t5.modeling_flax_t5.FlaxT5LayerNorm
    numpyro.distributions.BinomialLogits.log_prob
    numpyro.distributions.HalfCauchy.log_prob numpyro.distributions.HalfNormal.log_prob
    numpyro.distributions.MultivariateNormal.log_prob
    numpyro.distributions.MultivariateStudentT.log_prob
""".split()


def in_16_bits(x, dtype):
    """Numbers that a product returns as they are."""
    if np.issubdtype(x.dtype, np.floating) and x.ndim > 1:
        return x.astype(dtype).astype(np.float32)
    return x


def through_products(fn):
    """The function, of what comes out of 16-bit products."""

    def product(x):
        if not (jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1):
            return x
        return x @ jnp.eye(x.shape[-1])

    return lambda made, *inputs: fn(made, *map(product, inputs))


def parts(name):
    """A function of what was made before and of activations, and both."""
    fn, (made, *inputs) = LIBRARY_EXAMPLES[name]()
    if name.endswith("log_prob"):  # its arguments are all activations
        return lambda made, *inputs: fn(*inputs), (), [made, *inputs]
    return fn, made, inputs


@pytest.mark.parametrize("device", LOW)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_function_of_a_library_has_the_dtype_of_torch_and_the_values_of_float32(
    name, device
):
    fn, made, inputs = parts(name)
    inputs = [in_16_bits(x, LOW[device]) for x in inputs]
    run = jamp.autocast(through_products(fn), device_type=device)
    result, state = jax.jit(run)(made, *inputs)
    expected, expected_state = jax.jit(fn)(made, *inputs)
    eps = float(jnp.finfo(LOW[device]).eps)
    for leaf in jax.tree.leaves(result):
        lowered = device == "gpu" and name in CELLS
        as_input = name in AS_INPUT or (device == "cpu" and name not in FLOAT32)
        assert leaf.dtype == (LOW[device] if lowered or as_input else jnp.float32)
    assert {leaf.dtype for leaf in state} <= {np.dtype(np.float32)}
    pairs = zip(
        jax.tree.leaves((result, state)),
        jax.tree.leaves((expected, expected_state)),
        strict=True,
    )
    for leaf, want in pairs:
        # Cells multiply, in 16 bits.
        spacing = eps if name in CELLS or leaf.dtype == LOW[device] else 1e-5
        np.testing.assert_allclose(
            leaf.astype(jnp.float32), want, rtol=0, atol=spacing * jnp.abs(want).max()
        )


@pytest.mark.parametrize("name", [name for name in INSTALLED if name in CELLS])
def test_the_gates_of_a_cell_are_kept_in_16_bits_on_a_gpu(name):
    fn, made, inputs = parts(name)
    jaxpr = traced(jamp.autocast(fn, device_type="gpu"), made, *inputs)
    gates = operand_dtypes(jaxpr, "logistic", "tanh", "max")
    assert {dtypes[0] for dtypes in gates} == {"float16"}

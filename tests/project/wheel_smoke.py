"""What an installed jamp must do; run from outside the checkout, on its own."""

import importlib.util

import jax
import jax.numpy as jnp

import jamp
import jamp.pallas_kernels
from jamp.pallas_kernels.unscale import backends

for name in ("policies", "pallas_kernels"):
    if importlib.util.find_spec(name) is not None:
        raise SystemExit(f"{name} is importable as a top-level module")

for name in ("gpu", "cpu", "tpu"):
    jamp.Policy.load(name)

backends.measured()

matrix = jnp.ones((4, 4), jnp.float32)
product = jax.jit(jamp.autocast(jnp.matmul, device_type="cpu"))(matrix, matrix)
if product.dtype != jnp.bfloat16:
    raise SystemExit(f"autocast gave a {product.dtype} product, not a bfloat16 one")

# Reads a file that is no module.
jamp.explain(jnp.matmul)(matrix, matrix).to_html()

print(f"jamp works from {jamp.__file__} with JAX {jax.__version__}")

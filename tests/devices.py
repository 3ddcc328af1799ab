"""Device types with a policy of their own, and the 16 bits that they compute in."""

import jax.numpy as jnp
import pytest

LOW = {"gpu": jnp.float16, "cpu": jnp.bfloat16}

each_device = pytest.mark.parametrize("device", LOW)

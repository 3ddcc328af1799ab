"""Collectives over the axes that `jax.vmap` names, in derivative rules too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import each_device
from jax import lax

import jamp


@jax.custom_vjp
def summed_backwards(x):
    return x


@jax.custom_vjp
def summed_forwards(x):
    return lax.psum(x, "part")


@jax.custom_jvp
def summed(x):
    return lax.psum(x, "part")


summed_backwards.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "part"),))
summed_forwards.defvjp(lambda x: (summed_forwards(x), None), lambda _, ct: (ct,))
summed.defjvp(lambda x, t: (summed(*x), lax.psum(t[0], "part")))

HOLDERS = {
    "nothing": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fn: lambda w, x: lax.cond(x[0, 0] > 0, fn, fn, w, x),
    "scan": lambda fn: (
        lambda w, x: lax.scan(lambda c, _: (c + fn(w, x), None), 0.0, length=2)[0]
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("add", [summed_backwards, summed_forwards, summed])
@pytest.mark.parametrize("whole", [True, False])
@each_device
def test_rules_add_up_over_an_axis_that_vmap_names(add, holder, whole, device):
    """Tensor parallelism as it is tried on one device."""
    w, x = jnp.linspace(-1.0, 1.0, 32).reshape(2, 4, 4), jnp.ones((3, 4))

    def part(w, x):
        return jnp.mean(add(jnp.tanh(x @ w)) ** 2)

    def loss_of(cast_part, cast):
        held = cast_part(HOLDERS[holder](part))
        parts = jax.vmap(held, (0, None), axis_name="part")
        return cast(lambda w, x: parts(w, x).mean())

    cast, as_it_is = jamp.autocast(device_type=device), lambda fn: fn
    loss = loss_of(as_it_is, cast) if whole else loss_of(cast, as_it_is)
    # First: JAX keeps what it has traced of a rule.
    found = jax.jit(jax.grad(loss))(w, x)
    wanted = jax.grad(loss_of(as_it_is, as_it_is))(w, x)
    np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)

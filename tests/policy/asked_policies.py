"""What tests ask of a policy."""

import jax.numpy as jnp

import jamp

x22 = jnp.ones((2, 2))


def under(policy, fn):
    """The dtype of what a function of a 2x2 array returns under a policy."""
    return jamp.autocast(fn, policy=policy)(x22).dtype.name


def rule(policy, *args, **kwargs):
    """The name of the rule that a policy has for something, or None."""
    found = policy.rule(*args, **kwargs)
    return None if found is None else found.value

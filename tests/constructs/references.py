"""Programs that read and write references, `jax.Ref`, in what JAX calls and loops."""

import jax
import jax.numpy as jnp
from jax import lax

from ._construct import Construct


def through_a_reference(x, w):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ w
    ref[0] = ref[1] * 2
    return jnp.tanh(ref[...] @ w)


def summed_in_a_reference(x, w):
    total = jax.new_ref(jnp.zeros((4, 4)))
    for weight in (w, w.T):
        jax.ref.addupdate(total, ..., jnp.tanh(x @ weight))
    total[...] += x
    return jax.freeze(total)


def reference_in_a_scan(x, w):
    ref = jax.new_ref(x)

    def step(carry, _):
        ref[...] = jnp.tanh(ref[...] @ w)
        return carry, None

    lax.scan(step, 0, None, length=2)
    return ref[...] @ w


def reference_in_scans(x, w):
    total = jax.new_ref(jnp.zeros((4, 4)))

    def step(carry, row):
        def inner(y, _):
            total[...] += jnp.outer(y, row)
            return jnp.tanh(y @ w), None

        return lax.scan(inner, carry, None, length=2)[0], row @ w

    rows = lax.scan(step, x[0], x)[1]
    return rows @ total[...]


def reference_in_a_while_loop(x, w):
    ref = jax.new_ref(x)

    def body(carry):
        ref[...] = jnp.tanh(ref[...] @ w)
        return carry + 1

    lax.while_loop(lambda carry: carry < 2, body, 0)
    return ref[...] @ w


def reference_in_a_branch(x, w):
    ref = jax.new_ref(x)

    def write():
        ref[...] = jnp.tanh(ref[...] @ w)
        return x @ w

    return lax.cond(x[0, 0] < 9, write, lambda: x) @ ref[...]


def reference_in_a_jit(x, w):
    ref = jax.new_ref(x)

    @jax.jit
    def write(ref, w):
        ref[...] = jnp.tanh(ref[...] @ w)
        return ref[...] @ w

    return write(ref, w) @ ref[...]


def weight_in_a_reference(x, w):
    weight = jax.new_ref(w)
    return lax.scan(lambda y, _: (jnp.tanh(y @ weight[...]), None), x, length=2)[0]


CONSTRUCTS = (
    Construct("reference", through_a_reference),
    Construct("reference_addupdate", summed_in_a_reference),
    Construct("reference_in_scan", reference_in_a_scan),
    Construct("reference_in_scans", reference_in_scans),
    Construct(
        "reference_in_while",
        reference_in_a_while_loop,
        no_gradient="the length of the loop is not known",
    ),
    Construct(
        "reference_in_cond", reference_in_a_branch, no_vmap="a branch writes to it"
    ),
    Construct("reference_in_jit", reference_in_a_jit),
    Construct("weight_in_reference", weight_in_a_reference),
)

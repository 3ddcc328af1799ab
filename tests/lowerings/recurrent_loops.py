"""Loops of recurrent networks, their gradients, and the products in both."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxprs import equations

import jamp

LENGTH, ROWS, SIZE = 5, 4, 64

autocast = functools.partial(jamp.autocast, device_type="cpu", dtype=jnp.bfloat16)


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(SIZE, SIZE), (SIZE, SIZE), (SIZE,), (LENGTH, ROWS, SIZE)]
    return [jnp.float32(0.15 * rng.standard_normal(shape)) for shape in shapes]


def recurrent(of_state, **options):
    """A loop whose states are a function of the last one, weights and slices."""

    def loop(w, u, b, xs):
        def step(state, x):
            state = of_state(state, w, u, b, x)
            return state, state

        return lax.scan(step, xs[0], xs, **options)[1]

    return loop


def without_slices(w, u, b, xs):
    def step(state, _):
        return jnp.tanh(state @ w + b) @ u, None

    return lax.scan(step, xs[0], None, length=LENGTH)[0]


def with_an_integer(w, u, b, xs):
    def step(carried, x):
        count, state = carried
        state = jnp.tanh(x + state @ w + b) / (1 + count)
        return (count + 1, state), (count, state)

    (_, state), (_, states) = lax.scan(step, (0, xs[0]), xs)
    return state + states


def gated(state, w, u, b, x):
    """With a gate on one of the products."""
    return jnp.tanh(x + jax.nn.sigmoid(x + state @ w) * (state @ u + b))


def of_layers(cell):
    """A layer of Flax, whose matrices and biases are some sums."""

    def loop(w, u, b, xs):
        layer = nn.RNN(cell(SIZE), time_major=True)
        params = layer.init(jax.random.key(0), xs)
        own = jax.tree.map(lambda p: p + (w if p.ndim == 2 else b), params)
        return layer.apply(own, xs)

    return loop


LOOPS = {
    "a product": recurrent(lambda h, w, u, b, x: jnp.tanh(x + h @ w)),
    "a product and its bias": recurrent(lambda h, w, u, b, x: jnp.tanh(x + h @ w + b)),
    "a product of both": recurrent(lambda h, w, u, b, x: jnp.tanh(x @ u + h @ w)),
    "a layer that is normalised": recurrent(
        lambda h, w, u, b, x: jnp.tanh(x + jax.nn.standardize(h @ w + b))
    ),
    "nothing that is added": recurrent(lambda h, w, u, b, x: x * jnp.tanh(h @ w)),
    "no slices": without_slices,
    "a gate": recurrent(gated),
    "an integer beside it": with_an_integer,
    "a transposed weight": recurrent(lambda h, w, u, b, x: jnp.tanh(x + h @ w.T)),
    "the weight on the left": recurrent(
        lambda h, w, u, b, x: jnp.tanh(x + (w @ h.T).T)
    ),
    "a weight made in the loop": recurrent(
        lambda h, w, u, b, x: jnp.tanh(x + h @ jnp.sin(w))
    ),
    "one weight twice": recurrent(
        lambda h, w, u, b, x: jnp.tanh(x + jnp.tanh(h @ w) @ w)
    ),
    "a weight that is read elsewhere": recurrent(
        lambda h, w, u, b, x: jnp.tanh(x + h @ w + (w**2).mean(0))
    ),
    "a slice that is read elsewhere": recurrent(
        lambda h, w, u, b, x: x * jnp.tanh(x + h @ w)
    ),
    "backwards": recurrent(lambda h, w, u, b, x: jnp.tanh(x + h @ w), reverse=True),
    "unrolled": recurrent(lambda h, w, u, b, x: jnp.tanh(x + h @ w), unroll=2),
    "flax's LSTM": of_layers(nn.OptimizedLSTMCell),
    "flax's GRU": of_layers(nn.GRUCell),
}


def gradients(fn, argnums=(0, 1, 2, 3)):
    return jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), argnums)


def assert_near(found, wanted, most=2e-2):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert jnp.linalg.norm(one - other) <= most * jnp.linalg.norm(other)


def products(program):
    """The shapes of products in loops, and outside of them."""
    found = [], []
    loops = [e for e in equations(program) if e.primitive.name == "scan"]
    inside = {id(e) for loop in loops for e in equations(loop.params["jaxpr"])}
    for eqn in equations(program):
        if eqn.primitive.name == "dot_general":
            found[id(eqn) not in inside].append(eqn.outvars[0].aval.shape)
    return found

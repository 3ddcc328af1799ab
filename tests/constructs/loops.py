"""Loops and branches."""

import jax
import jax.numpy as jnp
from jax import lax

from ._construct import Construct, normal, square

UNKNOWN_LENGTH = "the number of iterations is not known when it is traced"


def scan(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.mean()), x, None, length=3)


def scan_reversed_and_unrolled(x, w):
    step = lambda c, row: (jnp.tanh(c @ w) + row, row @ w)  # noqa: E731
    return lax.scan(step, x, x, reverse=True, unroll=2)


def scan_unrolled_completely(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, None, length=3, unroll=True)


def scan_over_layers(x, w):
    layers = {"w": jnp.stack([w, w.T, w]), "b": jnp.stack([w[0], w[1], w[2]])}
    step = lambda c, p: (jnp.tanh(c @ p["w"] + p["b"]), c)  # noqa: E731
    return lax.scan(step, x, layers)


def scan_with_a_carry_made_inside(x, w):
    return lax.scan(lambda c, row: (c + row @ w, None), jnp.zeros(4), x)[0]


def scan_over_a_pytree(x, w):
    def step(carry, slices):
        left, (right, nothing) = slices["left"], slices["rest"]
        assert nothing is None
        mixed = jnp.tanh(left @ w) * right
        return {"sum": carry["sum"] + mixed, "last": mixed}, (mixed.sum(), left @ w)

    start = {"sum": jnp.zeros(4), "last": x[0]}
    return lax.scan(step, start, {"left": x, "rest": (x[::-1], None)})


def scan_with_carries_of_all_kinds(x, w):
    def step(carry, i):
        count, seen, nothing, key, hidden = carry
        key, used = jax.random.split(key)
        noise = jax.random.uniform(used, (4,))
        hidden = jnp.where(i % 2 == 0, jnp.tanh(hidden @ w + noise), hidden)
        return (count + i, seen | (i == 2), nothing, key, hidden), count

    start = (jnp.int32(0), jnp.bool_(False), None, jax.random.key(1), x)
    (count, seen, _, _, hidden), counts = lax.scan(step, start, jnp.arange(3))
    return count, seen, hidden, counts


def loops_with_a_flag_of_pythons(x, w):
    def step(carry, _):
        hidden, drops = carry
        return (jnp.where(drops, hidden, jnp.tanh(hidden @ w)), drops), None

    def again(_, carry):
        return step(carry, None)[0]

    carry, _ = lax.scan(step, (x, False), None, length=2)
    return lax.fori_loop(0, 2, again, (carry[0], False))[0]


def scan_in_scan(x, w):
    def outer(c, row):
        inner = lambda c, element: (jnp.tanh(c @ w) + element, None)  # noqa: E731
        return lax.scan(inner, c, row)[0], c.sum()

    return lax.scan(outer, x, x)


def scan_of_convolutions(image, kernels):
    def step(image, kernel):
        image = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(image), image.mean()

    return lax.scan(step, image, kernels)


def recurrent_network(xs, p):
    def step(h, x):
        update = jax.nn.sigmoid(x @ p["xz"] + h @ p["hz"])
        h = update * h + (1 - update) * jnp.tanh(x @ p["xh"] + h @ p["hh"])
        return h, h @ p["out"]

    return lax.scan(step, jnp.zeros((xs.shape[1], 4)), xs)


def gradient_descent(x, w):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w) - x) ** 2)

    def step(w, _):
        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.5 * gradient, value

    return lax.scan(step, w, None, length=3)


def while_loop(x, w):
    step = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w))  # noqa: E731
    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


def while_loop_with_a_matmul_in_its_condition(x, w):
    def goes_on(state):
        i, c = state
        return (i < 3) & (jnp.abs(c @ w).sum() < 1000)

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))


def while_loop_in_while_loop(x, w):
    def inner(c):
        step = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 2, step, (0, c))[1]

    step = lambda s: (s[0] + 1, inner(s[1] @ w) + x)  # noqa: E731
    return lax.while_loop(lambda s: s[0] < 2, step, (0, x))[1]


def fori_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i * 0.1, x)


@jax.jit
def fori_loop_up_to_an_argument(x, w, n):
    return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ w), x)


def fori_loop_that_fills_an_array(x, w):
    def step(i, filled):
        return filled.at[i].set(jnp.tanh(x[i] @ w))

    return lax.fori_loop(0, 4, step, jnp.zeros((4, 4)))


def cond(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)


def cond_without_operands(x, w):
    return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x @ w.T)


def cond_over_mixed_dtypes(x, w):
    operands = (x, w, x.astype(jnp.bfloat16), jnp.int32(2), {"mask": x > 0})

    def product(x, w, half, n, masks):
        return x @ w * n, n, jnp.where(masks["mask"], half, 0.0)

    def other(x, w, half, n, masks):
        return x * w, n + 1, jnp.where(masks["mask"], 0.0, half)

    return lax.cond(x.sum() > 0, product, other, *operands)


def switch(x, w, i):
    branches = [lambda x: x, lambda x: x @ w, lambda x: jnp.tanh(x @ w.T) @ w]
    return lax.switch(i, branches, x)


def cond_in_scan_in_jit(x, w):
    def step(c, i):
        branch = jax.jit(lambda c: jnp.tanh(c @ w))
        return lax.cond(i > 1, branch, jnp.sin, c), i

    return jax.jit(lambda x: lax.scan(step, x, jnp.arange(3)))(x)


def scan_in_cond(x, w):
    step = lambda c, row: (jnp.tanh(c @ w) + row, None)  # noqa: E731
    return lax.cond(x[0, 0] > 0, lambda: lax.scan(step, x, x)[0], lambda: x @ w)


def platform_dependent(x, w):
    return lax.platform_dependent(
        x, cpu=lambda x: jnp.tanh(x @ w), default=lambda x: jnp.tanh(w.T @ x.T).T
    )


def vectorized(x, w):
    product = jnp.vectorize(
        lambda row, w: jnp.tanh(row @ w), signature="(n),(n,m)->(m)"
    )
    return product(x, w)


def with_an_index():
    return *square(), jnp.int32(2)


def image_and_kernels():
    return normal(1, 4, 4, 2), normal(3, 3, 3, 2, 2, seed=1, scale=0.3)


def sequence_and_weights():
    names = ("xz", "hz", "xh", "hh", "out")
    weights = {name: normal(4, 4, seed=i, scale=0.5) for i, name in enumerate(names, 1)}
    return normal(5, 2, 4), weights


CONSTRUCTS = (
    Construct("scan", scan),
    Construct("scan_reversed_and_unrolled", scan_reversed_and_unrolled),
    Construct("scan_unrolled_completely", scan_unrolled_completely),
    Construct("scan_over_layers", scan_over_layers),
    Construct("scan_with_a_carry_made_inside", scan_with_a_carry_made_inside),
    Construct("scan_over_a_pytree", scan_over_a_pytree),
    Construct("scan_with_carries_of_all_kinds", scan_with_carries_of_all_kinds),
    Construct("loops_with_a_flag_of_pythons", loops_with_a_flag_of_pythons),
    Construct("scan_in_scan", scan_in_scan),
    Construct("scan_of_convolutions", scan_of_convolutions, image_and_kernels),
    Construct("recurrent_network", recurrent_network, sequence_and_weights),
    Construct("gradient_descent", gradient_descent),
    Construct("while_loop", while_loop, no_gradient=UNKNOWN_LENGTH),
    Construct(
        "while_loop_with_a_matmul_in_its_condition",
        while_loop_with_a_matmul_in_its_condition,
        no_gradient=UNKNOWN_LENGTH,
    ),
    Construct(
        "while_loop_in_while_loop",
        while_loop_in_while_loop,
        no_gradient=UNKNOWN_LENGTH,
    ),
    Construct("fori_loop", fori_loop),
    Construct(
        "fori_loop_up_to_an_argument",
        fori_loop_up_to_an_argument,
        with_an_index,
        no_gradient=UNKNOWN_LENGTH,
    ),
    Construct("fori_loop_that_fills_an_array", fori_loop_that_fills_an_array),
    Construct("map", lambda x, w: lax.map(lambda row: row @ w, x)),
    Construct(
        "map_in_batches_with_a_rest",
        lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=3),
    ),
    Construct(
        "associative_scan",
        lambda x, w: lax.associative_scan(jnp.matmul, jnp.stack([w, x, w, x])),
    ),
    Construct("cond", cond),
    Construct("cond_without_operands", cond_without_operands),
    Construct("cond_over_mixed_dtypes", cond_over_mixed_dtypes),
    Construct("switch", switch, with_an_index),
    Construct("cond_in_scan_in_jit", cond_in_scan_in_jit),
    Construct("scan_in_cond", scan_in_cond),
    Construct("platform_dependent", platform_dependent),
    Construct("vectorized", vectorized),
    Construct("vmap", jax.vmap(lambda row, w: jnp.tanh(row @ w), in_axes=(0, None))),
)

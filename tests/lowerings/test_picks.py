"""One element of each row, as the logit of a label, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations, traced

import jamp

LABELS = np.array([3, 0, 5, 3])


def taken(x, labels):
    return jnp.take_along_axis(x, labels[:, None], -1)[:, 0]


def taken_from_columns(x, labels):
    return jnp.take_along_axis(x.T, labels[None], 0)[0]


def taken_in_several_dimensions(x, labels):
    x, labels = x.reshape(2, 2, 1, 6), labels.reshape(2, 2, 1, 1)
    return jnp.take_along_axis(x, labels, -1).reshape(-1)


def begins_anew(x, labels):
    rows = jnp.tile(x, (75, 1)) * jnp.where(jnp.arange(300) < 256, 1, 2)[:, None]
    counted = jax.lax.iota(jnp.uint8, 300)  # from 256 on, it begins anew
    return rows[counted, jnp.tile(labels, 75)][-4:]


def by_pairs(x, labels):
    pairs = jnp.stack([labels // 3, labels % 3], -1)
    indices = jnp.concatenate([jnp.arange(4)[:, None], pairs], -1)
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1, 2), (0, 1, 2))
    return jax.lax.gather(x.reshape(4, 2, 3), indices, numbers, (1, 1, 1))


def of_chosen_rows(x, labels, from_the_first):
    rows = jax.lax.select(from_the_first, jnp.zeros(4, int), jnp.arange(4))
    return x[rows, labels]


PICKS = {
    "along an axis": taken,
    "along the first axis": taken_from_columns,
    "in several dimensions": taken_in_several_dimensions,
    "vmapped": jax.vmap(lambda row, label: row[label]),
    "in a jit": jax.jit(taken),
    "of few bits": lambda x, labels: taken(x, labels.astype(jnp.int8)),
    "from the end": lambda x, labels: taken(x, labels - 6),
    "some out of range": lambda x, labels: jnp.nan_to_num(taken(x, labels + 2)),
    "clipped": lambda x, labels: jnp.take_along_axis(
        x, labels[:, None] + 2, -1, mode="clip"
    )[:, 0],
    "two of a row": lambda x, labels: jnp.take_along_axis(
        x, jnp.stack([labels, labels[::-1]], -1), -1
    ).sum(-1),
    "of an order of rows": lambda x, labels: x[jnp.arange(4)[::-1], labels],
    "of some rows": lambda x, labels: jnp.append(x[jnp.arange(3), labels[:3]], 0),
    "of rows that are rounded": lambda x, labels: jnp.tile(x, (75, 1))[
        jnp.arange(300, dtype=jnp.bfloat16).astype(int), jnp.tile(labels, 75)
    ][-4:],
    "of a diagonal": lambda x, labels: x[jnp.arange(4), jnp.arange(4)],
    "of rows": lambda x, labels: x[labels % 4].sum(-1),
    "of one row again and again": lambda x, labels: x[
        jax.lax.broadcast_in_dim(jnp.arange(1), (4,), (0,)), labels
    ],
    "of rows that begin anew": begins_anew,
    "of rows that labels choose": lambda x, labels: of_chosen_rows(
        x, labels, jnp.asarray(labels) - 4 < 0
    ),
    "of rows that NumPy chooses": lambda x, labels: of_chosen_rows(
        x, labels, LABELS < 4
    ),
    "by row, and a pair": by_pairs,
}


COUNTED = np.arange(4)


def of_each_row(x, labels):
    return x[jnp.arange(4), labels]


def of_each_column(x, labels):
    return x.T[labels, jnp.arange(4)]


def with_rows_in_several_dimensions(x, labels):
    x, labels = x.reshape(2, 2, 6).swapaxes(1, 2), labels.reshape(2, 2)
    return x[jnp.arange(2)[:, None], labels, jnp.arange(2)].reshape(-1)


def vmapped_by_row(x, labels):
    x, labels = x.reshape(2, 2, 6), labels.reshape(2, 2)
    return jax.vmap(lambda x, labels: x[jnp.arange(2), labels])(x, labels).reshape(-1)


BY_ROW = {
    "of each row": of_each_row,
    "of each column": of_each_column,
    "with rows in several dimensions": with_rows_in_several_dimensions,
    "vmapped by row": vmapped_by_row,
    "with rows of NumPy": lambda x, labels: x[COUNTED, labels],
    "with rows from outside": lambda x, labels: x[jnp.asarray(COUNTED), labels],
    "with rows of few bits": lambda x, labels: x[jnp.arange(4, dtype=np.int8), labels],
    "by row from the end": lambda x, labels: of_each_row(x, labels - 6),
    "by row, some out of range": lambda x, labels: jnp.nan_to_num(
        of_each_row(x, labels + 2)
    ),
    "by row, clipped": lambda x, labels: x.at[jnp.arange(4), labels + 2].get(
        mode="clip"
    ),
}
PICKS.update(BY_ROW)


def loss_of(pick):
    """A loss that runs in float32, from the 16 bits of a product."""

    def loss(x, w):
        return jnp.sum(pick(jax.nn.log_softmax(x @ w), LABELS) * jnp.arange(1.0, 5.0))

    return loss


@pytest.mark.numbers
@pytest.mark.parametrize("device_type", ["cpu", "gpu"])
@pytest.mark.parametrize("name", PICKS)
def test_gradients_are_those_of_jax(name, device_type):
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.integers(-2, 3, shape)) for shape in ((4, 3), (3, 6)))
    loss = loss_of(PICKS[name])
    fn = jamp.autocast(loss, device_type=device_type, dtype=jnp.float16)
    # The products are exact, and what is rounded is their gradient alone.
    np.testing.assert_allclose(fn(x, w), loss(x, w), rtol=1e-6)
    for found, wanted in zip(
        jax.grad(fn, (0, 1))(x, w), jax.grad(loss, (0, 1))(x, w), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
    stacked = jnp.stack([x, x + 1])
    np.testing.assert_allclose(
        jax.vmap(jax.grad(fn), (0, None))(stacked, w),
        jax.vmap(jax.grad(loss), (0, None))(stacked, w),
        rtol=2e-3,
        atol=2e-3,
    )


def test_gradients_hold_in_both_modes_to_second_order():
    x = jnp.float32(np.random.default_rng(0).standard_normal((4, 6)))

    def curved(x):
        logits = x.astype(jnp.float16).astype(jnp.float32)
        return jnp.sum(taken(jax.nn.log_softmax(logits), LABELS) ** 2)

    fn = jamp.autocast(curved, device_type="gpu")
    tangent = x[::-1]
    for transform in (jax.grad, jax.jacfwd, lambda f: jax.jacfwd(jax.grad(f))):
        np.testing.assert_allclose(
            transform(fn)(x), transform(curved)(x), rtol=2e-3, atol=2e-3
        )
    _, along = jax.jvp(fn, (x,), (tangent,))
    np.testing.assert_allclose(along, jnp.vdot(jax.grad(fn)(x), tangent), rtol=2e-3)


def losses_of_optax(x, w):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS).mean()


LOSSES = {"optax": losses_of_optax} | {n: loss_of(BY_ROW[n]) for n in BY_ROW}


@pytest.mark.parametrize("device_type", ["cpu", "gpu"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_labels_needs_no_scatter(name, device_type):
    x, w, loss = jnp.ones((4, 3)), jnp.ones((3, 6)), LOSSES[name]
    gradient = jax.grad(jamp.autocast(loss, device_type=device_type))
    made = equations(traced(gradient, x, w))
    scattered = [e.outvars[0].aval.shape for e in made if "scatter" in e.primitive.name]
    assert not [shape for shape in scattered if np.prod(shape) == 24]


def test_labels_out_of_range_have_no_tangents_where_they_alone_are_vmapped():
    h, labels = jnp.ones((4, 6)), jnp.stack([LABELS, LABELS + 3])

    def picked(h, labels):
        return taken(jax.nn.log_softmax(h @ jnp.diag(jnp.arange(6.0))), labels)

    def tangents(fn):
        mapped = jax.vmap(fn, (None, 0))
        return jax.jvp(lambda h: mapped(h, labels), (h,), (h,))[1]

    found = tangents(jamp.autocast(picked, device_type="gpu"))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, tangents(picked), rtol=2e-3)

"""JAX's transformations around a function under autocast, and the state it shows."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.experimental import jet, sparse
from jax.test_util import check_grads
from jaxprs import equations, matmul_dtypes, traced

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
LOW_PAIR = ("float16", "float16")

RNG = np.random.default_rng(0)
X = jax.device_put(RNG.standard_normal((3, 4)).astype(np.float32))
W = jax.device_put(RNG.standard_normal((4, 4)).astype(np.float32) / 2)


def model(w, x):
    return jnp.tanh(jax.nn.softmax(jnp.tanh(x @ w)) @ w)


def loss(w, x=X):
    return jnp.sum(model(w, x).astype(jnp.float32) ** 2)


def near(actual, expected, relative=0.02):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max()
    assert error <= relative * max(np.abs(expected).max(), 1e-3)


def test_the_comparison_fails_for_a_wrong_value():
    near(X, X)
    with pytest.raises(AssertionError):
        near(X * 1.1, X)


def test_jvp_gives_tangents_in_the_dtype_of_the_result():
    value, tangent = jax.jvp(gpu(model), (W, X), (W, X))
    assert value.dtype == tangent.dtype
    near(tangent, jax.jvp(model, (W, X), (W, X))[1])


def test_vjp_takes_cotangents_in_the_dtype_of_the_result():
    value, pull = jax.vjp(gpu(model), W, X)
    gradients = pull(jnp.ones_like(value))
    assert [g.dtype for g in gradients] == [jnp.float32] * 2
    expected = jax.vjp(model, W, X)[1](jnp.ones((3, 4)))
    for actual, wanted in zip(gradients, expected, strict=True):
        near(actual, wanted)


def test_linearize_gives_the_same_tangents_as_jvp():
    value, push = jax.linearize(gpu(model), W, X)
    near(push(W, X), jax.jvp(model, (W, X), (W, X))[1])
    assert value.dtype == push(W, X).dtype


@pytest.mark.parametrize(
    "derivative",
    [
        jax.hessian,
        lambda f: jax.jacfwd(jax.jacrev(f)),
        lambda f: jax.jacrev(jax.jacrev(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
    ],
    ids=[
        "hessian",
        "forward over reverse",
        "reverse over reverse",
        "forward over forward",
    ],
)
def test_second_derivatives(derivative):
    actual = jax.jit(derivative(gpu(loss)))(W)
    assert actual.dtype == jnp.float32
    near(actual, jax.jit(jax.hessian(loss))(W), 0.05)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_checkpoint_outside_gives_the_same_gradient(order):
    fn = jax.checkpoint(gpu(loss)) if order == "outside" else gpu(jax.checkpoint(loss))
    gradient = jax.grad(fn)(W)
    assert gradient.dtype == jnp.float32
    near(gradient, jax.grad(loss)(W))


def test_checkpoint_outside_recomputes_in_16_bits():
    program = traced(jax.grad(jax.checkpoint(gpu(loss))), W)
    assert set(matmul_dtypes(program)) == {LOW_PAIR}
    assert any(
        eqn.primitive.name == "remat2" or "checkpoint" in eqn.primitive.name
        for eqn in equations(program)
    )


def test_vmap_of_grad_gives_a_gradient_for_each_example():
    batch = jnp.stack([X, 2 * X])
    actual = jax.vmap(jax.grad(gpu(loss)), (None, 0))(W, batch)
    assert actual.dtype == jnp.float32
    near(actual, jax.vmap(jax.grad(loss), (None, 0))(W, batch))


def test_value_and_grad_with_auxiliary_results():
    def with_aux(w):
        y = model(w, X)
        return jnp.sum(y.astype(jnp.float32) ** 2), {"y": y, "n": jnp.int32(3)}

    (value, aux), gradient = jax.value_and_grad(gpu(with_aux), has_aux=True)(W)
    assert aux["n"] == 3
    near(value, loss(W))
    near(gradient, jax.grad(loss)(W))


def conv_loss(w, x=X):
    image = x[None, :, :, None] @ w[:1]
    convolved = jax.lax.conv_general_dilated(
        image, w[None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(convolved**2)


@pytest.mark.parametrize("fn", [loss, conv_loss])
def test_where_jit_is_disabled_it_computes_the_same(fn):
    transformed = jax.value_and_grad(gpu(fn))
    expected = transformed(W)
    with jax.disable_jit():
        actual = transformed(W)
    for one, other in zip(actual, expected, strict=True):
        near(one, other, relative=1e-3)


def all_float32():
    policy = jamp.Policy.load("gpu")
    lowered = [name for name, rule in policy.primitives if rule.value == "lower"]
    lowered += [entry for entry, rule in policy.functions if rule.value == "lower"]
    return policy.with_rules(float32=lowered)


@pytest.mark.numbers
def test_numerical_derivatives_agree_under_an_all_float32_policy():
    fn = jamp.autocast(loss, policy=all_float32())
    check_grads(fn, (W,), order=2, modes=("fwd", "rev"), atol=5e-2, rtol=5e-2)


def test_the_state_is_seen_inside_and_not_outside():
    seen = []

    def fn(x):
        seen.append((jamp.is_autocast_enabled(), jamp.get_autocast_dtype()))
        return x

    assert not jamp.is_autocast_enabled()
    gpu(fn)(X)
    gpu(fn, dtype=jnp.bfloat16)(X)
    jamp.autocast(fn, enabled=False)(X)
    assert seen[0] == (True, jnp.float16)
    assert seen[1] == (True, jnp.bfloat16)
    assert seen[2][0] is False
    assert not jamp.is_autocast_enabled()


def test_the_state_is_that_of_the_device_asked_for():
    seen = {}

    def fn(x):
        for device in ("gpu", "cuda", "rocm", "cpu", "tpu"):
            seen[device] = jamp.is_autocast_enabled(device)
        seen["dtype"] = [jamp.get_autocast_dtype(d) for d in ("gpu", "cpu")]
        return x

    gpu(fn, dtype=jnp.bfloat16)(X)
    assert [d for d in seen if d != "dtype" and seen[d]] == ["gpu", "cuda", "rocm"]
    assert seen["dtype"] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("gpu", jnp.float16),
        ("cuda", jnp.float16),
        ("rocm", jnp.float16),
        ("cpu", jnp.bfloat16),
        ("tpu", jnp.bfloat16),
    ],
)
def test_each_device_type_has_a_default_dtype(device, dtype):
    assert jamp.is_autocast_available(device)
    assert jamp.get_autocast_dtype(device) == dtype
    assert jamp.autocast(lambda x: x @ x, device_type=device)(W).dtype == dtype


def test_an_unknown_device_type_is_not_available():
    assert not jamp.is_autocast_available("abacus")
    with pytest.raises(jamp.AutocastError, match="abacus"):
        jamp.get_autocast_dtype("abacus")


@pytest.mark.parametrize("device_type", ["xpu", "mps"])
def test_a_device_of_torchs_is_not_taken_for_another(device_type):
    with pytest.raises(jamp.AutocastError, match=rf"'{device_type}' \(known are"):
        jamp.autocast(lambda x: x @ x, device_type=device_type)(W)


def test_a_backend_without_a_policy_asks_for_a_device_type(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    with pytest.raises(jamp.AutocastError, match=r"on 'METAL'.* device_type"):
        jamp.autocast(lambda x: x @ x)(W)


def test_a_backend_without_a_policy_takes_what_needs_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    assert jamp.autocast(lambda x: x @ x, enabled=False)(W).dtype == W.dtype
    fn = jamp.autocast(lambda w: jnp.sum(w @ w), device_type="gpu")
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1))
    state = tx.init(W)
    _, grads = jamp.value_and_grad(fn)(state, W)
    assert jamp.metrics(state, grads)["loss_scale"] == 2.0**16
    updates, _ = tx.update(grads, state, W)
    assert jnp.isfinite(updates).all()


def test_the_default_device_type_is_that_of_the_backend():
    backend = jax.default_backend()
    assert jamp.get_autocast_dtype() == jamp.get_autocast_dtype(backend)
    assert jamp.autocast(lambda x: x @ x)(W).dtype == jamp.get_autocast_dtype(backend)


def test_the_state_is_restored_when_tracing_fails():
    def fails(x):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        gpu(fails)(X)
    assert not jamp.is_autocast_enabled()


def test_importing_and_decorating_does_not_start_a_backend():
    # jax.distributed.initialize and jax_num_cpu_devices must come before that.
    program = (
        "import jax, jamp\n"
        "jamp.autocast(abs), jamp.autocast(dtype='float16'), jamp.GradScaler()\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "assert len(jax.devices()) == 2\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def until_small(x, limit):
    """Halves a vector by a matmul until its sum is small; counts the steps."""
    halve = jnp.eye(4) / 2

    def step(carry):
        return carry[0] @ halve, carry[1] + 1

    return jax.lax.while_loop(lambda c: c[0].sum() > limit, step, (x, 0))


BATCHED_LOOPS = {
    "autocast inside": lambda f: jax.vmap(gpu(f)),
    "autocast outside": lambda f: gpu(jax.vmap(f)),
    "in a jit inside": lambda f: gpu(jax.jit(jax.vmap(f))),
    "in a jit outside": lambda f: jax.jit(gpu(jax.vmap(f))),
}


@pytest.mark.parametrize("order", BATCHED_LOOPS)
def test_members_of_a_batch_leave_a_while_loop_one_by_one(order):
    x = jnp.arange(1.0, 4)[:, None] * jnp.ones((3, 4))
    limits = jnp.asarray([1.0, 0.5, 3.0])
    value, steps = BATCHED_LOOPS[order](until_small)(x, limits)
    wanted, expected = jax.vmap(until_small)(x, limits)
    # One that stays in no iteration leaves as it came.
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(steps, expected)
    near(value, wanted)


def test_members_of_nested_batches_leave_a_while_loop_one_by_one():
    x = jnp.arange(1.0, 7).reshape(2, 3)[..., None] * jnp.ones((2, 3, 4))
    limits = jnp.asarray([[1.0, 0.5, 3.0], [2.0, 0.25, 9.0]])
    value, steps = gpu(jax.vmap(jax.vmap(until_small)))(x, limits)
    wanted, expected = jax.vmap(jax.vmap(until_small))(x, limits)
    np.testing.assert_array_equal(steps, expected)
    near(value, wanted)


def test_a_batched_while_loop_has_tangents():
    x, limits = jnp.arange(1.0, 4)[:, None] * jnp.ones((3, 4)), jnp.ones(3)

    def tangents(fn):
        return jax.jvp(lambda x: fn(x, limits)[0], (x,), (jnp.ones_like(x),))[1]

    near(tangents(gpu(jax.vmap(until_small))), tangents(jax.vmap(until_small)))


def test_diagnose_follows_a_batched_while_loop():
    x = jnp.arange(1.0, 4)[:, None] * jnp.ones((3, 4))
    found = jamp.diagnose(jax.vmap(until_small), device_type="gpu", progress=False)
    assert found(x, jnp.asarray([1.0, 0.5, 3.0])).healthy


def second_derivative(x):
    """Along a direction, by Taylor series."""
    series = jet.jet(loss, (x,), ((jnp.ones_like(x), jnp.zeros_like(x)),))
    return series[1][1]


def of_sparse(w):
    product = sparse.sparsify(lambda x, w: x @ w)
    return product(sparse.BCOO.fromdense(X, nse=X.size), w)


@pytest.mark.parametrize("fn", [second_derivative, of_sparse])
def test_a_transform_with_rules_of_its_own_stands_inside(fn):
    near(gpu(fn)(W), fn(W))


LOOPS = {
    "scan": lambda x: lax.scan(lambda c, row: (c + row @ W, None), jnp.zeros(4), x)[0],
    "map": lambda x: lax.map(lambda row: jnp.tanh(row @ W), x),
}


@pytest.mark.parametrize("form", LOOPS)
def test_a_loop_over_rows_is_exported_for_any_number_of_them(form):
    (rows,) = export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    exported = export.export(jax.jit(gpu(LOOPS[form])))(shape)
    near(exported.call(X), LOOPS[form](X))


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit, jax.vmap])
def test_a_function_is_applied_to_an_element(transform):
    def applied(x):
        return (x @ W).at[0].apply(jnp.exp)

    rows = jnp.stack([X, X])
    near(transform(gpu(applied))(rows), transform(applied)(rows))


def test_what_a_checkpoint_computes_again_stays_so_around_a_gradient():
    block = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))

    def stacked(w, x):
        for _ in range(3):
            x = block(x, w)
        return jnp.sum(x)

    gradient = jax.grad(stacked)
    near(gpu(gradient)(W, X), gradient(W, X))
    again = [
        [
            eqn.params["differentiated"]
            for eqn in equations(jax.make_jaxpr(fn)(W, X))
            if eqn.primitive.name == "remat2"
        ]
        for fn in (gradient, gpu(gradient))
    ]
    assert again[0].count(True) == again[1].count(True) == 3

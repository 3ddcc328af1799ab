"""`jamp.metrics`: the right numbers, everywhere, and no wait for the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

TX = jamp.dynamic_loss_scaling(
    optax.adam(0.1), jamp.GradScaler(init_scale=2.0**10, growth_interval=3)
)
COUNTERS = ["loss_scale", "growth_tracker"]
COUNTS = ["last_step_skipped", "skipped_steps", "total_steps"]
FLOAT32 = np.finfo(np.float32)


def parameters():
    return {"w": jnp.array([3.0, -4.0]), "b": jnp.array(12.0)}


def quadratic(params):
    """A loss whose gradient is its argument."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params)) / 2


def step(carry, factor):
    """A step of training, with its metrics."""
    params, opt_state = carry
    _, grads = jamp.value_and_grad(quadratic)(opt_state, params)
    grads = jax.tree.map(lambda grad: grad * factor, grads)
    logged = jamp.metrics(opt_state, grads)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), logged


def norm_in_float64(grads, scale=1.0):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    wide = np.concatenate([leaf.astype(np.float64).ravel() for leaf in leaves])
    # A vector's norm, taken so that float64 does not overflow either.
    return np.linalg.norm(wide / scale)


def grad_norm(grads, scale=1.0):
    state = jamp.GradScaler(min_scale=None).init()._replace(scale=jnp.float32(scale))
    norm = jamp.metrics(state, grads)["grad_norm"]
    assert (norm.dtype, norm.shape) == (jnp.float32, ())
    return float(norm)


def test_each_number_is_that_of_its_step():
    _, logged = jax.lax.scan(
        step, (parameters(), TX.init(parameters())), jnp.array([1, 1, 1, jnp.inf, 1, 1])
    )
    assert logged["loss_scale"].tolist() == [1024, 1024, 1024, 2048, 1024, 1024]
    assert logged["growth_tracker"].tolist() == [0, 1, 2, 0, 0, 1]
    assert logged["last_step_skipped"].tolist() == [False] * 4 + [True, False]
    assert logged["skipped_steps"].tolist() == [0, 0, 0, 0, 1, 1]
    assert logged["total_steps"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (
        np.isfinite(logged["grad_norm"]).tolist() == [True] * 3 + [False] + [True] * 2
    )
    assert logged["grad_norm"][0] == 13.0


def test_all_are_scalars_on_the_device():
    opt_state = TX.init(parameters())
    logged = jamp.metrics(opt_state, parameters())
    assert set(logged) == {*COUNTERS, *COUNTS, "grad_norm"}
    assert all(isinstance(value, jax.Array) for value in logged.values())
    assert {value.shape for value in logged.values()} == {()}
    floats = {name for name in logged if logged[name].dtype == jnp.float32}
    assert floats == {"loss_scale", "grad_norm"}
    assert logged["last_step_skipped"].dtype == jnp.bool_
    assert "grad_norm" not in jamp.metrics(opt_state)


def nnx_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


HOLDERS = {
    "state": lambda: TX.init(parameters()),
    "chain": lambda: optax.chain(optax.identity(), TX).init(parameters()),
    "TrainState": lambda: TrainState.create(apply_fn=None, params=parameters(), tx=TX),
    "nnx": lambda: nnx_optimizer().opt_state,
}


@pytest.mark.filterwarnings("ignore:if this is the state of an optax.chain")
@pytest.mark.parametrize("name", HOLDERS)
def test_whatever_holds_a_loss_scale_has_metrics(name):
    holder = HOLDERS[name]()
    logged = jamp.metrics(holder, parameters())
    assert logged["loss_scale"] == jamp.loss_scale(holder) == 1024
    assert set(logged) == {*COUNTERS, *COUNTS, "grad_norm"}


def test_a_scaler_state_knows_its_counters_only():
    state = jamp.GradScaler(init_scale=8.0).init()
    logged = jamp.metrics(state, parameters())
    assert set(logged) == {*COUNTERS, "grad_norm"}
    assert logged["grad_norm"] == 13 / 8


def test_without_a_loss_scale_there_are_no_metrics():
    with pytest.raises(jamp.ScalerError, match="found no loss scale"):
        jamp.metrics(optax.adam(0.1).init(parameters()))


def test_gradients_of_nnx_have_a_norm():
    model, optimizer = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx_optimizer()
    grads = nnx.grad(lambda model: 1024 * quadratic(nnx.state(model)))(model)
    expected = norm_in_float64(nnx.to_pure_dict(nnx.state(model)))
    logged = jamp.metrics(optimizer.opt_state, grads)
    np.testing.assert_allclose(logged["grad_norm"], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_the_norm_is_that_of_float64(dtype):
    rng = np.random.default_rng(0)
    grads = [
        jnp.asarray(rng.normal(size=shape), dtype) for shape in [(300, 40), (7,), ()]
    ]
    as_float64 = [np.abs(np.asarray(leaf, np.complex128)) for leaf in grads]
    expected = norm_in_float64(as_float64, 1000.0)
    np.testing.assert_allclose(grad_norm(grads, 1000.0), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**16, 2.0**60, 2.0**126])
@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e-12, 1.0, 1e12, 1e25, 1e38])
def test_the_norm_overflows_only_if_a_gradient_does(scale, size):
    """With numbers whose squares float32 could not hold, and with a mixture."""
    for spread in (1.0, 1e-3):
        grads = jnp.array([1.0, -2.0, 3.0, spread]) * (size / 3)
        unscaled = np.abs(np.asarray(grads, np.float64)) / scale
        if unscaled.min() < FLOAT32.tiny:
            continue  # denormal numbers are flushed
        actual = grad_norm(grads, scale)
        if unscaled.max() > FLOAT32.max:
            assert actual == np.inf
        else:
            np.testing.assert_allclose(actual, np.linalg.norm(unscaled), rtol=1e-6)


def test_a_million_large_gradients_have_a_finite_norm():
    np.testing.assert_allclose(grad_norm(jnp.full(10**6, 3e35)), 3e38, rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "others", "norm"),
    [(np.inf, 1.0, np.inf), (np.nan, 1.0, np.nan), (np.nan, np.inf, np.nan)],
)
def test_an_overflow_shows_in_the_norm(value, others, norm):
    grads = {"a": jnp.array([others, -1.0]), "b": jnp.array([0.0, value])}
    np.testing.assert_equal(grad_norm(grads, 2.0**16), norm)


def test_gradients_of_zero_and_no_gradients_have_norm_zero():
    assert grad_norm({"a": jnp.zeros(3), "empty": jnp.zeros((0, 2))}) == 0
    assert grad_norm({}) == 0


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**127])
def test_the_norm_is_not_finite_where_the_scaler_finds_an_overflow(scale):
    """A scale that is too small or too large to divide by."""
    scaler = jamp.GradScaler(min_scale=None)
    state = scaler.init()._replace(scale=jnp.float32(scale))
    _, found_inf = scaler.unscale(state, jnp.ones(3))
    assert found_inf
    assert not np.isfinite(grad_norm(jnp.ones(3), scale))


def test_integers_among_the_gradients_do_not_count():
    assert grad_norm({"w": jnp.array([3.0, 4.0]), "n": jnp.array([7])}) == 5


def test_nothing_is_sent_to_or_read_from_the_device():
    """Reading is not guarded on CPUs; that jit can trace it shows that none is read."""
    params = parameters()
    opt_state = TX.init(params)
    jamp.metrics(opt_state, params)  # compiles, which sends constants
    with jax.transfer_guard("disallow"):
        eager = jamp.metrics(opt_state, params)
        jitted = jax.jit(jamp.metrics)(opt_state, params)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.add(params["w"], 1.0)
    for name in eager:
        assert eager[name] == jitted[name]


def test_metrics_outlive_a_donated_state():
    opt_state = TX.init(parameters())
    logged = jamp.metrics(opt_state)
    jax.jit(lambda state: state, donate_argnums=0)(opt_state)
    assert jamp.loss_scale(opt_state).is_deleted()
    assert logged["loss_scale"] == 1024


def mesh():
    return jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,))


def test_gradients_sharded_under_jit_have_the_norm_of_all():
    grads = jnp.arange(64.0).reshape(16, 4)
    sharded = jax.device_put(grads, NamedSharding(mesh(), P("d")))
    logged = jax.jit(jamp.metrics)(TX.init(grads), sharded)
    expected = norm_in_float64(grads, 1024)
    np.testing.assert_allclose(logged["grad_norm"], expected, rtol=1e-6)


@pytest.mark.parametrize("size, axis_name", [(1.0, "d"), (1e30, "d"), (1.0, ["d"])])
def test_with_an_axis_name_the_norm_is_that_of_all_shards(size, axis_name):
    grads = jnp.arange(64.0).reshape(16, 4) * size
    local = functools.partial(jamp.metrics, axis_name=axis_name)
    sharded = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    logged = jax.jit(sharded)(TX.init(grads), grads)
    expected = norm_in_float64(grads, 1024)
    np.testing.assert_allclose(logged["grad_norm"], expected, rtol=1e-6)


def test_the_norm_is_computed_as_written_under_an_autocast_around_it():
    grads = {"w": jnp.float32([3e-6, -4e-6])}
    state = jamp.GradScaler(init_scale=2.0**4).init()
    policy = jamp.Policy.load("gpu").with_rules(lower=["mul", "square"])
    norm = jamp.autocast(
        lambda grads: jamp.metrics(state, grads)["grad_norm"],
        device_type="gpu",
        policy=policy,
    )
    np.testing.assert_allclose(norm(grads), 5e-6 / 2**4, rtol=1e-6)

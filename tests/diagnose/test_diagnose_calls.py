"""`jamp.diagnose` on calls with modules, mutable arrays, and JAX's own NaN checks."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from diagnosed import EYE, diagnose

import jamp

X = np.linspace(0.1, 3, 64, dtype=np.float32).reshape(8, 8)


def gradients(diagnosis):
    return [label for label in diagnosis.errors if label.startswith("gradient of ")]


class Network(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


def weighted(w, network, x):
    return jnp.mean(network(x) * w)


LINEAR = [f"gradient of args[1]['linear']['{name}']" for name in ("bias", "kernel")]


def test_beside_a_module_the_gradient_is_of_argnums():
    args = (EYE, Network(), X)
    found = diagnose(weighted, loss_scale=1.0)(*args)
    assert gradients(found) == ["gradient of args[0]"]
    found = diagnose(weighted, loss_scale=1.0, argnums=1)(*args)
    assert set(LINEAR) < set(gradients(found))
    assert all(label.startswith("gradient of args[1]") for label in gradients(found))
    found = diagnose(weighted, loss_scale=1.0, argnums=(0, 1))(*args)
    assert {*LINEAR, "gradient of args[0]"} < set(gradients(found))


def large_loss(w):
    return jnp.sum(jnp.abs((w @ EYE) @ (300 * EYE)))


def test_of_a_step_whose_loss_is_under_autocast_the_rest_is_as_written():
    def step(w):
        loss = jamp.autocast(large_loss, device_type="gpu")
        grads = jax.grad(loss)(w)
        return (1000 * w) @ (1000 * w.T), grads, loss(1e3 * w)

    found = jamp.diagnose(step, progress=False)(X)
    assert found.header.startswith("autocast where the function has it")
    here = large_loss.__code__.co_firstlineno + 1
    assert [f.location.line for f in found.findings] == [here]
    under = jamp.diagnose(step, device_type="gpu", progress=False)(X)
    assert len(under.findings) > 1


@pytest.mark.parametrize(("size", "healthy"), [(100.0, True), (3e5, False)])
def test_a_step_is_compared_as_it_runs(size, healthy):
    def step(w, x):
        loss = jamp.autocast(lambda w: jnp.mean(x @ w), device_type="gpu")
        return jax.grad(lambda w: loss(w) * 2.0**15)(w)

    w, x = jnp.ones((8, 8)), jnp.full((8, 8), size)
    # Gradients of weights are float32: that of 100, 409600, is no overflow.
    found = jamp.diagnose(step)(w, x)
    assert found.healthy == healthy == bool(jnp.isfinite(step(w, x)).all())


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_of_a_step_that_loss_scaling_skips_the_scale_is_told(jit):
    loss = jamp.autocast(lambda w, x: jnp.mean(50 * jnp.tanh(x @ w)), dtype=jnp.float16)
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1), jamp.GradScaler(init_scale=2.0**24))

    def step(w, opt_state, x):
        value, grads = jamp.value_and_grad(loss)(opt_state, w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, value

    w, x = jnp.eye(8) / 8, jnp.ones((4, 8))
    assert step(w, tx.init(w), x)[1].last_step_skipped
    (told,) = jamp.diagnose(jit(step), progress=False)(w, tx.init(w), x).suggestions
    assert told.code == "jamp.diagnose(loss_fn, loss_scale=16777216.0)"
    assert "skips this step" in told.reason
    low, high = jamp.diagnose(loss, loss_scale=2.0**24)(w, x).scale_window
    assert low < high < 2.0**24


def doubled(x, key):
    with jax.enable_x64(True):
        h = x.astype(jnp.float64)
        h, rows = jax.lax.scan(lambda h, row: (h * 1.1, row * 1.1), h, h)
        h = jax.vmap(lambda h: jax.lax.while_loop(less, lambda h: h * 1.1, h))(h)
        return (h + rows).astype(jnp.float32)


def less(h):
    return jnp.sum(h) < 40.0


def drawn(x, key):
    with jax.threefry_partitionable(False):
        return x + jax.random.normal(key, x.shape)


@pytest.mark.parametrize("made", [doubled, drawn])
def test_operations_run_in_the_settings_that_they_were_traced_in(made):
    def fn(x, key):
        return made(x, key) + (300 * (x @ EYE)) ** 2 @ EYE * 1e-5

    diagnosis = diagnose(fn)(X, jax.random.key(0))
    assert [finding.kind for finding in diagnosis.findings] == ["overflow"]
    # Compiled as a whole, with a change, it is what float32 gave here.
    assert [suggestion.cured for suggestion in diagnosis.suggestions] == [True]


def test_a_number_of_an_argument_may_be_numpys():
    found = diagnose(jnp.vdot, loss_scale=1.0, argnums=np.int64(1))(X, X)
    assert gradients(found) == ["gradient of args[1]"]


def test_what_is_updated_is_named_as_part_of_its_module():
    network = Network()
    found = diagnose(lambda w, network, x: network(x) @ w)(EYE, network, X)
    assert "result" in found.errors
    assert "state of args[1]['norm']['mean']" in found.errors


def test_a_new_module_is_named_as_the_result_or_the_state_that_it_is():
    def fn(network, x):
        network.cache = nnx.Cache(network(x))
        network.calls = 1
        return network.linear, nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    network = Network()
    errors = diagnose(fn)(network, X).errors
    assert "state of args[0]['cache']" in errors
    assert "result[1]['kernel'].value" in errors
    assert not any("result[0]" in name for name in errors)  # it is an argument
    assert not hasattr(network, "calls")


def test_beside_random_numbers_alone_the_gradient_is_of_argnums():
    def loss_fn(w, rngs):
        return jnp.mean(w @ rngs.normal((8, 8)))

    found = diagnose(loss_fn, loss_scale=1.0)(EYE, nnx.Rngs(0))
    assert gradients(found) == ["gradient of args[0]"]


def test_the_gradient_of_a_method_is_of_its_argument():
    found = diagnose(lambda x: jnp.mean(network(x) ** 2), loss_scale=1.0)
    network = Network()
    assert gradients(found(X)) == ["gradient of args[0]"]


@pytest.mark.parametrize("check", [jax.debug_nans, jax.debug_infs])
def test_jax_may_be_asked_to_stop_at_what_is_not_finite(check):
    def fn(x):
        h = 1000 * (x @ EYE)
        return jnp.mean((h * h - h * h) @ EYE)

    with check(True):
        diagnosis = diagnose(fn)(X)
    assert diagnosis.findings[0].kind == "overflow"


def passed(x, ref):
    ref[...] = x
    return jnp.mean(ref[...])


def made_inside(x, ref):
    own = jax.new_ref(x)
    own[...] = own[...] @ EYE
    return jnp.mean(own[...])


def made_inside_a_jit(x, ref):
    return jax.jit(made_inside)(x, None)


@pytest.mark.parametrize("fn", [passed, made_inside, made_inside_a_jit])
@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_mutable_arrays_are_refused(fn, loss_scale):
    with pytest.raises(jamp.AutocastTypeError, match="mutable arrays"):
        diagnose(fn, loss_scale=loss_scale)(X, jax.new_ref(X))


def test_has_aux_takes_a_pair():
    with pytest.raises(
        jamp.AutocastTypeError, match=r"pair \(loss, aux\), got one array"
    ):
        diagnose(lambda x: jnp.mean(x @ EYE), loss_scale=1.0, has_aux=True)(X)

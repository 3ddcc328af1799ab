"""dynamic_loss_scaling and the functions of a training loop, in torch's and JAX's."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scaler_reference import NON_FINITE, bits, same, state_of, torch_adam, trajectories

import jamp
from jamp import GradScaler, ScalerError, ScalerTypeError

TRAJECTORIES = {run.trace.name: run for run in trajectories()}
TORCHS = {
    "sgd_lr0.1": optax.sgd(0.1),
    "sgd_momentum0.9": optax.sgd(0.05, momentum=0.9),
    "adam_lr0.05": torch_adam(0.05),
    "adam_accum4": optax.MultiSteps(torch_adam(0.05), 4),
}


def train_step_of(tx, loss_fn):
    """A step of training whose gradient an event overwrites in one place."""

    def train_step(carry, event):
        params, opt_state = carry
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params)
        grads = jnp.where(event, grads.at[1].set(jnp.inf), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (params, opt_state.scaler_state)

    return train_step


@pytest.mark.parametrize("name", TORCHS)
def test_parameters_follow_torchs(name):
    run = TRAJECTORIES[name]
    tx = jamp.dynamic_loss_scaling(TORCHS[name], GradScaler(**run.trace.config))
    params = jnp.asarray(run.start)
    # The inf of a batch comes in one of its micro-batches, each time in another.
    events = np.zeros((len(run.trace.events), run.micro_batches), bool)
    which = np.arange(len(events)) % run.micro_batches
    events[np.arange(len(events)), which] = run.trace.events
    _, (params, states) = jax.jit(
        lambda *args: jax.lax.scan(train_step_of(tx, run.loss), *args)
    )((params, tx.init(params)), events.reshape(-1))
    last = slice(run.micro_batches - 1, None, run.micro_batches)
    np.testing.assert_allclose(params[last], run.params, rtol=1e-6, atol=1e-6)
    assert bits(states.scale[last]) == bits(run.trace.scale)
    assert bits(states.growth_tracker[last]) == bits(run.trace.tracker)


def quadratic(params):
    """A loss whose gradient is known."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params)) / 2


def parameters():
    """A tree of two leaves."""
    return {"w": jnp.array([3.0, -4.0]), "b": jnp.array(2.0)}


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_a_skipped_step_updates_by_zero_and_keeps_the_inner_state(value, leaf):
    tx = jamp.dynamic_loss_scaling(
        optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), GradScaler(init_scale=8.0)
    )
    params, opt_state = parameters(), tx.init(parameters())
    update = jax.jit(tx.update)
    _, before = update(params, opt_state, params)
    grads = params | {leaf: (params[leaf] * value)}
    updates, after = update(grads, before, params)
    assert same(updates, jax.tree.map(jnp.zeros_like, params))
    assert same(after.inner_state, before.inner_state)
    assert (float(jamp.loss_scale(before)), float(jamp.loss_scale(after))) == (8.0, 4.0)
    assert not jamp.last_step_skipped(before)
    assert jamp.last_step_skipped(after)
    assert (int(after.skipped_steps), int(after.total_steps)) == (1, 2)
    assert not any(state.overflowed for state in (before, after))


def test_an_overflow_that_unscaling_makes_skips_the_step():
    tiny = float(np.finfo(np.float32).tiny)
    tx = jamp.dynamic_loss_scaling(optax.sgd(1.0), GradScaler(init_scale=tiny))
    params = jnp.ones(2)
    for update in (tx.update, jax.jit(tx.update)):
        updates, opt_state = update(jnp.array([0.0, 8.0]), tx.init(params), params)
        assert jamp.last_step_skipped(opt_state)
        assert updates.tolist() == [0.0, 0.0]


def test_clipping_inside_sees_unscaled_gradients():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = jamp.dynamic_loss_scaling(inner)
    params = {"w": jnp.array([3.0, 4.0])}
    opt_state = tx.init(params)
    _, grads = jamp.value_and_grad(quadratic)(opt_state, params)
    assert grads["w"].tolist() == [3.0 * 65536, 4.0 * 65536]
    updates, _ = tx.update(grads, opt_state, params)
    np.testing.assert_allclose(updates["w"], [-0.6, -0.8], rtol=1e-6)


def recorder(seen):
    """An optimizer that keeps the extra arguments it was given."""

    def update(updates, state, params=None, **extra_args):
        del params
        seen.update(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def test_extra_arguments_arrive_and_grad_is_unscaled():
    seen, params = {}, {"w": jnp.ones(2)}
    tx = jamp.dynamic_loss_scaling(recorder(seen), GradScaler(init_scale=8.0))
    given = {"value": jnp.array(5.0), "value_fn": quadratic, "grad": params}
    _, opt_state = tx.update(params, tx.init(params), params, **given)
    assert seen["value_fn"] is quadratic
    assert seen["value"] == 5.0
    assert seen["grad"]["w"].tolist() == [0.125, 0.125]
    assert given["grad"] is params
    assert not jamp.last_step_skipped(opt_state)
    given["grad"] = {"w": jnp.array([jnp.nan, 1.0])}
    _, opt_state = tx.update(params, tx.init(params), params, **given)
    assert jamp.last_step_skipped(opt_state)


def test_an_optimizer_without_extra_arguments_is_not_given_any():
    tx = jamp.dynamic_loss_scaling(optax.GradientTransformation(*optax.sgd(1.0)[:2]))
    params = jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params, value=1.0)
    assert (updates < 0).all()


def lbfgs_run(tx, loss, value_and_grad, params):
    """Parameters and optimizer state after some steps with a line search."""

    @jax.jit
    def train_step(params, opt_state):
        value, grads = value_and_grad(loss)(opt_state, params)
        extra = {"value": value, "grad": grads, "value_fn": loss}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for _ in range(6):
        params, opt_state = train_step(params, opt_state)
    return params, opt_state


def test_lbfgs_searches_along_unscaled_gradients():
    loss, start = TRAJECTORIES["sgd_lr0.1"].loss, jnp.array([1.0, -2.0, 0.5])
    inner = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(10))
    plain = lambda loss: lambda _, params: jax.value_and_grad(loss)(params)  # noqa: E731
    params, opt_state = lbfgs_run(
        jamp.dynamic_loss_scaling(inner), loss, jamp.value_and_grad, start
    )
    expected, _ = lbfgs_run(inner, loss, plain, start)
    np.testing.assert_allclose(params, expected, rtol=1e-5)
    assert loss(params) < loss(start) - 1.0
    assert int(opt_state.skipped_steps) == 0


def test_two_optimizers_share_a_scale_and_skip_on_their_own():
    scaler, tx = GradScaler(init_scale=8.0, growth_interval=2), optax.sgd(1.0)

    @jax.jit
    def train_step(state, generator, critic, poison):
        flags, stepped = [], []
        for player, bad in zip((generator, critic), poison, strict=True):
            grads = jax.grad(lambda p: scaler.scale(state, quadratic(p)))(player)
            grads, found = scaler.unscale(state, grads * jnp.where(bad, jnp.inf, 1.0))
            empty = tx.init(player)
            player, _, taken = scaler.step(state, tx, grads, found, empty, player)
            flags.append(found)
            stepped.append((player, taken))
        return scaler.update(state, flags), stepped

    state = scaler.init()
    for poison, scale, tracker in (
        ((False, False), 8.0, 1),
        ((False, True), 4.0, 0),
        ((True, False), 2.0, 0),
        ((False, False), 2.0, 1),
        ((False, False), 4.0, 0),
    ):
        state, stepped = train_step(state, jnp.ones(2), jnp.ones(3), poison)
        assert same(state, state_of(scale, tracker, int(any(poison))))
        for (player, taken), bad in zip(stepped, poison, strict=True):
            assert taken == (not bad)
            assert (player == (1.0 if bad else 0.0)).all()


def test_float16_parameters_are_refused_by_name():
    params = {"dense": {"kernel": jnp.ones(2, jnp.float16)}, "b": jnp.ones(())}
    with pytest.raises(ScalerError, match=r"the parameters at \['dense'\]\['kernel'\]"):
        jamp.dynamic_loss_scaling(optax.sgd(0.1)).init(params)
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1), GradScaler(enabled=False))
    tx.init(params)


@pytest.mark.parametrize(
    "inner", [optax.adam(0.1), optax.MultiSteps(optax.sgd(1.0), 2)]
)
def test_disabled_it_is_the_optimizer(inner):
    tx = jamp.dynamic_loss_scaling(inner, GradScaler(enabled=False))
    params = {"w": jnp.array([1.0, 2.0])}
    opt_state, plain_state = tx.init(params), inner.init(params)
    loss, grads = jamp.value_and_grad(quadratic)(opt_state, params)
    assert same((loss, grads), jax.value_and_grad(quadratic)(params))
    grads["w"] = grads["w"].at[0].set(jnp.inf)
    for _ in range(2):
        updates, opt_state = tx.update(grads, opt_state, params)
        expected, plain_state = inner.update(grads, plain_state, params)
        assert same(updates, expected)
        assert same(opt_state.inner_state, plain_state)
        assert not jamp.last_step_skipped(opt_state)
        assert jamp.loss_scale(opt_state) == 1.0


def loss_with_everything(a, b, *, shift, power=2.0):
    """A loss with two differentiable arguments, keywords and something else."""
    loss = jnp.sum((a * b + shift) ** power)
    return loss.astype(jnp.bfloat16), {"product": a * b}


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), np.array([0, 1])], ids=str)
def test_value_and_grad_returns_the_value_and_scaled_gradients(argnums, transform):
    state = state_of(8.0)
    arguments = (jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0]))
    scaled = transform(
        jamp.value_and_grad(loss_with_everything, argnums=argnums, has_aux=True)
    )
    plain = jax.value_and_grad(
        lambda *args, **kwargs: loss_with_everything(*args, **kwargs)[0], argnums
    )
    (loss, aux), grads = scaled(state, *arguments, shift=0.25)
    expected, expected_grads = plain(*arguments, shift=0.25)
    assert loss.dtype == jnp.bfloat16
    assert bits(loss) == bits(expected)
    assert same(aux, {"product": arguments[0] * arguments[1]})
    assert same(grads, jax.tree.map(lambda grad: grad * 8, expected_grads))


def test_value_and_grad_passes_jax_options_on_and_refuses_no_number():
    fn = jamp.value_and_grad(lambda p: p["w"] ** 2 * p["n"], allow_int=True)
    _, grads = fn(state_of(4.0), {"w": jnp.array(3.0), "n": jnp.array(2)})
    assert grads["w"] == 4 * 3 * 2 * 2
    assert grads["n"].dtype == jax.dtypes.float0
    with pytest.raises(ScalerTypeError, match="got str"):
        jamp.value_and_grad(lambda p: "loss")(state_of(4.0), jnp.ones(()))


def test_a_loss_may_have_an_argument_of_any_name():
    fn = jamp.value_and_grad(lambda w, opt_state: w * opt_state)
    assert fn(state_of(4.0), jnp.array(3.0), opt_state=2.0) == (6.0, 8.0)


def test_update_has_the_names_of_optax():
    tx = jamp.dynamic_loss_scaling(optax.sgd(1.0), jamp.GradScaler(init_scale=4.0))
    w = jnp.array([4.0])
    updates, _ = tx.update(updates=w, state=tx.init(w), params=w)
    assert updates == -1.0


def test_the_scaler_steps_what_accumulates_gradients():
    scaler, w = jamp.GradScaler(), jnp.array([4.0])
    tx = optax.MultiSteps(optax.sgd(1.0), 2)
    opt_state = tx.init(w)
    for _ in range(2):
        step = scaler.step(scaler.init(), tx, jnp.array([3.0]), False, opt_state, w)
        w, opt_state, _ = step
    assert w == 1.0


def test_value_and_grad_keeps_the_name_of_the_loss():
    assert jamp.value_and_grad(quadratic).__name__ == "quadratic"
    assert jamp.value_and_grad(quadratic).__doc__ == quadratic.__doc__


def test_scale_loss_scales_as_the_scaler_does():
    state = state_of(8.0)
    losses = {"a": jnp.bfloat16(2.0), "b": [jnp.ones(2, jnp.float16), 3]}
    assert same(jamp.scale_loss(losses, state), GradScaler().scale(state, losses))


def test_an_ensemble_has_a_scale_for_each_member():
    run = TRAJECTORIES["sgd_momentum0.9"]
    tx = jamp.dynamic_loss_scaling(
        TORCHS["sgd_momentum0.9"], GradScaler(**run.trace.config)
    )
    events = np.stack([run.trace.events, np.zeros_like(run.trace.events)])
    starts = jnp.stack([run.start, run.start])

    def train(start, events):
        train_step = train_step_of(tx, run.loss)
        return jax.lax.scan(train_step, (start, tx.init(start)), events)

    (_, opt_state), (params, states) = jax.jit(jax.vmap(train))(starts, events)
    np.testing.assert_allclose(params[0], run.params, rtol=1e-6, atol=1e-6)
    assert bits(states.scale[0]) == bits(run.trace.scale)
    assert opt_state.skipped_steps.tolist() == [int(run.trace.events.sum()), 0]
    assert float(jamp.loss_scale(opt_state)[1]) == 2.0 ** (15 + 60 // 4)


def test_a_disabled_wrapper_undoes_the_scale_of_a_restored_state():
    params = jnp.array([1.0, 2.0])
    restored = jamp.dynamic_loss_scaling(optax.sgd(1.0)).init(params)
    tx = jamp.dynamic_loss_scaling(optax.sgd(1.0), jamp.GradScaler(enabled=False))
    _, grads = jamp.value_and_grad(lambda p: (p**2).sum())(restored, params)
    updates, _ = tx.update(grads, restored, params)
    np.testing.assert_array_equal(updates, [-2.0, -4.0])


@pytest.mark.parametrize("argnums", [-1, [0, -1]])
def test_arguments_may_be_counted_from_the_end(argnums):
    differentiate = jamp.value_and_grad(lambda x, w: x * w, argnums)
    _, grads = differentiate(state_of(8.0), jnp.float32(3), jnp.float32(2))
    assert jax.tree.leaves(grads)[-1] == 24


def test_what_is_scaled_after_a_gradient_was_taken_is_not_kept():
    jamp.value_and_grad(lambda x: x * x)(state_of(8.0), jnp.float32(3))
    scaled = jamp.scale_loss(jnp.float32(3), state_of(8.0))
    kept = weakref.ref(scaled)
    del scaled
    assert kept() is None

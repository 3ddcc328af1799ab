"""dynamic_loss_scaling around and inside the optimizers and wrappers of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from scaler_reference import NON_FINITE, all_finite, poisoned, same

import jamp

SCALER = jamp.GradScaler(init_scale=2.0**10, growth_interval=2)
KEY = jax.random.key(0)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 10)

OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(0.01),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(SCHEDULE),
    "adamax": lambda: optax.adamax(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adan": lambda: optax.adan(0.01),
    "ademamix": lambda: contrib.ademamix(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "cocob": lambda: contrib.cocob(),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(),
    "dog": lambda: contrib.dog(),
    "fromage": lambda: optax.fromage(0.1),
    "galore": lambda: contrib.galore(0.01, rank=2),
    "lamb": lambda: optax.lamb(0.01),
    "lars": lambda: optax.lars(0.01),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "lion": lambda: optax.lion(0.01),
    "madgrad": lambda: contrib.madgrad(0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "momo": lambda: contrib.momo(0.1),
    "muon": lambda: contrib.muon(0.1),
    "nadam": lambda: optax.nadam(0.01),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=KEY),
    "novograd": lambda: optax.novograd(0.01),
    "optimistic_gd": lambda: optax.optimistic_gradient_descent(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "prodigy": lambda: contrib.prodigy(),
    "radam": lambda: optax.radam(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "rprop": lambda: optax.rprop(0.01),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1),
    "sgd": lambda: optax.sgd(SCHEDULE),
    "signum": lambda: optax.signum(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
}
TAKES_A_VALUE = {"momo", "polyak_sgd"}
SELDOM = """adadelta ademamix cocob dadapt_adamw dog galore madgrad mechanize momo
    optimistic_gd rprop sam schedule_free signum""".split()
each_optimizer = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else [])
        for name in OPTIMIZERS
    ],
)


def parameters():
    """Two leaves: a matrix, as some optimizers want one, and a vector."""
    return {
        "b": jnp.array([0.5, -0.25, 1.0, 2.0]),
        "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4),
    }


def random_gradients(steps, overflows):
    """Gradients of each step; some with an inf or a NaN somewhere in the matrix."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        grads = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
            parameters(),
        )
        place, value = (1, rng.integers(grads["w"].size)), rng.choice(NON_FINITE)
        yield poisoned(grads, place, value) if step in overflows else grads


def stepper(tx, scale_loss=jamp.scale_loss, **extra_args):
    """A training step that scales the gradients as a scaled loss would."""

    @jax.jit
    def train_step(params, opt_state, grads):
        grads = scale_loss(grads, opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state

    return train_step


def run(tx, train_step, steps, overflows=(), left_out=()):
    """Parameters and optimizer state at the start and after each step."""
    states = [(parameters(), tx.init(parameters()))]
    for step, grads in enumerate(random_gradients(steps, overflows)):
        before = states[-1]
        states.append(before if step in left_out else train_step(*before, grads))
    return states


def plain_run(tx, steps, left_out, **extra_args):
    """The run of an optimizer without loss scaling, some steps left out."""
    train_step = stepper(tx, lambda grads, _: grads, **extra_args)
    return run(tx, train_step, steps, left_out=left_out)


def assert_close(a, b):
    """Equal but for the order in which a compiler adds and multiplies."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 1e-7), a, b)


OVERFLOWS = (0, 3, 4, 7)


@pytest.mark.numbers
@each_optimizer
def test_the_run_is_the_optimizers_own_without_the_skipped_steps(name):
    inner = optax.with_extra_args_support(OPTIMIZERS[name]())
    extra = {"value": jnp.array(1.5)} if name in TAKES_A_VALUE else {}
    tx = jamp.dynamic_loss_scaling(inner, SCALER)
    train_step = stepper(tx, **extra)
    states = run(tx, train_step, 9, OVERFLOWS)
    without = run(tx, train_step, 9, left_out=OVERFLOWS)
    for (params, opt_state), (expected, expected_state) in zip(
        states, without, strict=True
    ):
        assert all_finite((params, opt_state))
        assert same(params, expected)
        assert same(opt_state.inner_state, expected_state.inner_state)
    params, opt_state = states[-1]
    assert not same(params, parameters())
    assert_close(params, plain_run(inner, 9, OVERFLOWS, **extra)[-1][0])
    assert (int(opt_state.skipped_steps), int(opt_state.total_steps)) == (4, 9)
    # Four overflows, and two finite steps in a row twice.
    assert float(opt_state.scaler_state.scale) == 2.0**8


def scaling(inner):
    """The optimizer under test, as a part of others."""
    return jamp.dynamic_loss_scaling(inner, SCALER)


LABELS = {"b": "frozen", "w": "trained"}
ONLY_W = {"b": False, "w": True}
ONLY_B = {"b": True, "w": False}
CLIPPED = (optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))

# An optimizer as a function of what stands for dynamic_loss_scaling: the identity
# gives the optimizer to compare with.
NESTED = {
    "alone": lambda wrap: wrap(optax.adam(0.1)),
    "end of a chain": lambda wrap: optax.chain(
        optax.identity(), wrap(optax.adam(SCHEDULE))
    ),
    "named chain": lambda wrap: optax.named_chain(("all", wrap(optax.adam(0.1)))),
    "around clipping": lambda wrap: wrap(optax.chain(*CLIPPED)),
    "around partition": lambda wrap: wrap(
        optax.partition({"frozen": optax.sgd(0.1), "trained": optax.adam(0.1)}, LABELS)
    ),
    "in partition": lambda wrap: optax.partition(
        {"frozen": optax.set_to_zero(), "trained": wrap(optax.adam(0.1))}, LABELS
    ),
    "around masked": lambda wrap: wrap(optax.masked(optax.adam(0.1), ONLY_W)),
    "in masked": lambda wrap: optax.chain(
        optax.masked(wrap(optax.adam(0.1)), ONLY_W),
        optax.masked(optax.set_to_zero(), ONLY_B),
    ),
    "around inject_hyperparams": lambda wrap: wrap(
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE)
    ),
    "in inject_hyperparams": lambda wrap: optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.adam(learning_rate))
    )(learning_rate=0.1),
    "around apply_if_finite": lambda wrap: wrap(
        optax.apply_if_finite(optax.adam(0.1), 3)
    ),
    "around flatten": lambda wrap: wrap(optax.flatten(optax.adam(0.1))),
    "in flatten": lambda wrap: optax.flatten(wrap(optax.adam(0.1))),
}


@pytest.mark.filterwarnings("ignore:if this is the state of an optax.chain")
@pytest.mark.parametrize("name", NESTED)
def test_a_run_in_company_is_the_plain_one_without_the_skipped_steps(name):
    tx, plain = NESTED[name](scaling), NESTED[name](lambda inner: inner)
    states = run(tx, stepper(tx), 9, OVERFLOWS)
    expected = plain_run(plain, 9, OVERFLOWS)
    for step, (state, plain_state) in enumerate(zip(states, expected, strict=True)):
        assert all_finite(state)
        assert_close(state[0], plain_state[0])
        if step:
            assert jamp.last_step_skipped(state[1]) == (step - 1 in OVERFLOWS)
    assert jamp.loss_scale(states[-1][1]) == 2.0**8


@pytest.mark.parametrize("name", ["in partition", "in masked"])
def test_only_the_leaves_that_an_optimizer_has_decide(name):
    tx, params = NESTED[name](scaling), parameters()
    update = jax.jit(tx.update)
    for place, skipped in (((0, 1), False), ((1, 1), True)):
        grads = poisoned(params, place, jnp.nan)
        _, opt_state = update(grads, tx.init(params), params)
        assert jamp.last_step_skipped(opt_state) == skipped


@pytest.mark.parametrize("name", ["clipped", "adam", "lamb"])
def test_a_skipped_step_is_no_alarm_for_jax_debug_nans(name):
    own = optax.chain(*CLIPPED) if name == "clipped" else OPTIMIZERS[name]()
    tx, params = scaling(own), parameters()
    grads = poisoned(params, (0, 1), jnp.inf)
    state, scaler_state, inner_state = tx.init(params), SCALER.init(), own.init(params)
    with jax.debug_nans(True):
        updates, after = tx.update(grads, state, params)
        kept, kept_state, _ = SCALER.step(
            scaler_state, own, *SCALER.unscale(scaler_state, grads), inner_state, params
        )
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(own.update(grads, own.init(params), params))
    assert jamp.last_step_skipped(after)
    assert same((kept, kept_state), (params, inner_state))
    assert same(optax.apply_updates(params, updates), params)
    assert same(after.inner_state, state.inner_state)


def test_a_schedule_does_not_advance_in_a_skipped_step():
    tx = scaling(optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE))
    rates = [
        float(state.inner_state.hyperparams["learning_rate"])
        for _, state in run(tx, stepper(tx), 5, (1, 2))[1:]
    ]
    expected = [float(SCHEDULE(count)) for count in (0, 0, 0, 1, 2)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_lookahead_keeps_both_sets_of_parameters_in_a_skipped_step():
    plain = optax.lookahead(optax.sgd(0.5, momentum=0.9), 2, 0.5)
    tx = scaling(plain)
    params = optax.LookaheadParams.init_synced(parameters())
    train_step, plain_step = stepper(tx), stepper(plain, lambda grads, _: grads)
    plain_params, plain_state = params, plain.init(params)
    opt_state = tx.init(params)
    for step, grads in enumerate(random_gradients(6, (1, 4))):
        params, opt_state = train_step(params, opt_state, grads)
        if step not in (1, 4):
            plain_params, plain_state = plain_step(plain_params, plain_state, grads)
        assert_close(params, plain_params)
        assert_close(opt_state.inner_state, plain_state)


def normalized_ascent():
    """Sharpness-aware minimization, which calls a `grad_fn` by itself."""
    ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.1, momentum=0.9), ascent, opaque_mode=True)


@pytest.mark.parametrize("value", NON_FINITE)
def test_an_overflow_in_gradients_that_an_optimizer_takes_skips_the_step(value):
    functions = [lambda p, _: p, lambda p, _: poisoned(p, (0, 1), value)]

    def train(tx, scale, left_out=()):
        params = parameters()
        opt_state, states = tx.init(params), []
        for step in range(4):
            grad_fn = functions[step == 2 and not left_out]
            if step not in left_out:
                grads = scale(params, opt_state)
                updates, opt_state = tx.update(
                    grads, opt_state, params, grad_fn=grad_fn
                )
                params = optax.apply_updates(params, updates)
            states.append((params, opt_state))
        return states

    found = train(scaling(normalized_ascent()), jamp.scale_loss)
    expected = train(normalized_ascent(), lambda grads, _: grads, (2,))
    for (params, opt_state), (plain, plain_state) in zip(found, expected, strict=True):
        assert_close(params, plain)
        assert_close(opt_state.inner_state, plain_state)
    assert [bool(state.last_step_skipped) for _, state in found] == [0, 0, 1, 0]


def test_an_overflow_in_a_function_among_others_skips_the_step():
    sam, params = normalized_ascent(), parameters()
    tx = scaling(
        optax.GradientTransformationExtraArgs(
            sam.init,
            lambda grads, state, params, functions: sam.update(
                grads, state, params, grad_fn=functions["grad"]
            ),
        )
    )
    functions = {"grad": lambda p, _: poisoned(p, (0, 1), jnp.nan)}
    updates, opt_state = tx.update(params, tx.init(params), params, functions=functions)
    assert jamp.last_step_skipped(opt_state)
    assert same(optax.apply_updates(params, updates), params)


def test_a_scaler_takes_no_step_with_such_an_overflow():
    params, tx, state = parameters(), normalized_ascent(), SCALER.init()
    for grad_fn, taken in (
        (lambda p, _: p, True),
        (lambda p, _: poisoned(p, (0, 1), jnp.nan), False),
    ):
        opt_state = tx.init(params)
        after, after_state, stepped = SCALER.step(
            state, tx, params, jnp.array(False), opt_state, params, grad_fn=grad_fn
        )
        assert bool(stepped) == taken
        assert all_finite((after, after_state))
        assert same((after, after_state), (params, opt_state)) != taken


def test_clipping_before_it_in_a_chain_clips_scaled_gradients():
    tx = optax.chain(optax.clip(2.0**10), scaling(optax.sgd(1.0)))
    params = {"w": jnp.zeros(3)}
    grads = {"w": jnp.array([0.25, 3.0, -7.0]) * 2.0**10}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w"].tolist() == [-0.25, -1.0, 1.0]


@pytest.mark.filterwarnings("ignore:optax.apply_if_finite around")
def test_apply_if_finite_around_it_delays_the_back_off_and_lets_nothing_through():
    tx = optax.apply_if_finite(scaling(optax.sgd(0.1)), 2)
    states = run(tx, stepper(tx), 6, (1, 2, 3, 4))
    assert all_finite(states)
    scales = [float(jamp.loss_scale(state)) for _, state in states]
    assert scales == [2.0**10] * 4 + [2.0**9, 2.0**8, 2.0**8]
    assert all(same(params, states[1][0]) for params, _ in states[2:6])


def test_a_gradient_given_by_name_is_no_alarm_for_jax_debug_nans():
    def update(grads, state, params, grad):
        return jax.tree.map(lambda one, same: one + 0 * same, grads, grad), state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update)
    tx, params = scaling(inner), parameters()
    grads = poisoned(params, (0, 1), jnp.inf)
    with jax.debug_nans(True):
        _, after = tx.update(params, tx.init(params), params, grad=grads)
    assert jamp.last_step_skipped(after)

"""Where a scale is found: in states, wrappers of optax, and what Flax trains with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from scaler_reference import same

import jamp
from jamp import GradScaler, ScalerError


def quadratic(params):
    """A loss whose gradient is known."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params)) / 2


def parameters():
    """A tree of two leaves."""
    return {"w": jnp.array([3.0, -4.0]), "b": jnp.array(2.0)}


TX = jamp.dynamic_loss_scaling(optax.adam(0.1), GradScaler(init_scale=32.0))


def nnx_optimizer(tx):
    """An nnx.Optimizer, and the model it is for."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


HOLDERS = {
    "state": lambda: TX.init(parameters()),
    "chain": lambda: optax.chain(optax.identity(), TX).init(parameters()),
    "masked": lambda: optax.masked(TX, {"w": True, "b": False}).init(parameters()),
    "MultiSteps": lambda: optax.MultiSteps(TX, 2).init(parameters()),
    "dict": lambda: {"params": parameters(), "opt": [None, TX.init(parameters())]},
    "TrainState": lambda: TrainState.create(apply_fn=None, params=parameters(), tx=TX),
    "nnx.Optimizer.opt_state": lambda: nnx_optimizer(TX)[1].opt_state,
    "nnx.Optimizer": lambda: nnx_optimizer(TX)[1],
}


@pytest.mark.filterwarnings(
    "ignore:if this is the state of an optax.chain",
    "ignore:optax.(MultiSteps|masked) around",
)
@pytest.mark.parametrize("name", HOLDERS)
def test_the_scale_is_found_where_the_optimizer_is(name):
    holder = HOLDERS[name]()
    assert isinstance(jamp.loss_scale(holder), jax.Array)
    assert jamp.loss_scale(holder) == 32.0
    assert not jamp.last_step_skipped(holder)
    assert jamp.scale_loss(jnp.array(2.0), holder) == 64.0


def test_a_scaler_state_has_a_scale_but_took_no_step():
    assert jamp.loss_scale(GradScaler().init()) == 65536.0
    with pytest.raises(ScalerError, match=r"GradScaler\.step returns it"):
        jamp.last_step_skipped(GradScaler().init())


@pytest.mark.parametrize("read", [jamp.loss_scale, jamp.last_step_skipped])
def test_several_scales_or_none_are_an_error(read):
    two = optax.partition({"w": TX, "b": TX}, {"w": "w", "b": "b"})
    with pytest.raises(ScalerError, match="found 2 loss scales in PartitionState"):
        read(two.init(parameters()))
    for tree, kind in ((optax.adam(0.1).init(parameters()), "tuple"), ({}, "dict")):
        with pytest.raises(ScalerError, match=f"found no loss scale in {kind}"):
            read(tree)


@pytest.mark.parametrize(
    ("given", "hint"), [(TX, r"tx.init\(params\)"), (GradScaler(), r"scaler.init\(\)")]
)
def test_what_makes_a_state_is_told_from_the_state(given, hint):
    for read in (jamp.loss_scale, lambda tree: jamp.value_and_grad(quadratic)(tree, 1)):
        with pytest.raises(ScalerError, match=f"found no loss scale .* is {hint}"):
            read(given)


def test_a_flax_train_state_trains_and_skips():
    state = TrainState.create(apply_fn=None, params=parameters(), tx=TX)

    @jax.jit
    def train_step(state, factor):
        _, grads = jamp.value_and_grad(lambda p: quadratic(p) * factor)(
            state, state.params
        )
        return state.apply_gradients(grads=grads)

    after = train_step(state, 1.0)
    assert not same(after.params, state.params)
    skipped = train_step(after, jnp.inf)
    assert same(skipped.params, after.params)
    assert jamp.loss_scale(skipped) == 16.0
    assert jamp.last_step_skipped(skipped)


def test_value_and_grad_is_of_those_variables_that_argnums_names():
    model = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.LoRAParam)
    some = nnx.DiffState(0, nnx.LoRAParam)

    def loss(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    x = jnp.ones((3, 8))
    value, grads = jamp.value_and_grad(loss, argnums=some)(optimizer, model, x)
    expected, expected_grads = nnx.value_and_grad(loss, argnums=some)(model, x)
    assert value == expected
    scale = jamp.loss_scale(optimizer)
    assert same(grads, jax.tree.map(lambda grad: grad * scale, expected_grads))
    optimizer.update(model, grads)
    assert (model.lora.lora_b[...] != 0).any()


def test_an_nnx_optimizer_trains_and_skips():
    model, optimizer = nnx_optimizer(TX)

    @nnx.jit
    def train_step(model, optimizer, x):
        scale = jamp.loss_scale(optimizer.opt_state)
        grads = nnx.grad(lambda model: (model(x) ** 2).sum() * scale)(model)
        optimizer.update(model, grads)

    kernels = [np.asarray(model.kernel[...])]
    for value in (1.0, jnp.inf):
        train_step(model, optimizer, jnp.full((1, 2), value))
        kernels.append(np.asarray(model.kernel[...]))
    assert not np.array_equal(kernels[0], kernels[1])
    assert np.array_equal(kernels[1], kernels[2])
    assert jamp.last_step_skipped(optimizer.opt_state)
    assert jamp.loss_scale(optimizer.opt_state) == 16.0

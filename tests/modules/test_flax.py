"""Modules of Flax under autocast: what they keep, and training them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from constructs import nnx as constructs
from constructs.linen import ConvBlock
from flax import nnx
from jaxprs import dtypes

import jamp

LOW_PAIR = ("float16", "float16")
gpu = functools.partial(jamp.autocast, device_type="gpu")

X = np.random.default_rng(1).standard_normal((8, 4), np.float32)
X, Y = jax.device_put((X, np.sin(X[:, :2])))


def near(actual, expected, tolerance=0.02):
    assert dtypes(actual) == dtypes(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * (0.1 + np.abs(y).max()))


class Net(nnx.Module):
    """Layers, a norm with statistics and dropout with a counter."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        return self.second(self.dropout(x))

    def squared(self, x, y):
        return jnp.mean((self(x).astype(jnp.float32) - y) ** 2)


def loss(model, x, y):
    return model.squared(x, y)


def changing(model):
    """The state that a call changes, keys left out."""
    return nnx.state(model, constructs.CHANGING)


WAYS = {
    "function": lambda model: gpu(model)(X),
    "closure": lambda model: gpu(lambda x: model(x))(X),
    "argument": lambda model: gpu(lambda model, x: model(x))(model, X),
    "keyword": lambda model: gpu(lambda x, *, model: model(x))(X, model=model),
    "in_a_tree": lambda model: gpu(lambda tree: tree["m"][0](tree["x"]))(
        {"m": [model], "x": X}
    ),
    "method": lambda model: gpu(model.__call__)(X),
    "partial": lambda model: gpu(functools.partial(lambda m, x: m(x), model))(X),
    "state": lambda model: _of_state(model),
    "jit_outside": lambda model: nnx.jit(gpu(lambda m, x: m(x)))(model, X),
    "jit_inside": lambda model: gpu(nnx.jit(lambda m, x: m(x)))(model, X),
    "remat_inside": lambda model: gpu(nnx.remat(lambda m, x: m(x)))(model, X),
    "remat_outside": lambda model: nnx.remat(gpu(lambda m, x: m(x)))(model, X),
}


def _of_state(model):
    """The functional way: the updated state is a result, and put back by the user."""
    graph, state = nnx.split(model)

    def pure(state, x):
        copy = nnx.merge(graph, state, copy=True)
        return copy(x), nnx.state(copy)

    result, state = gpu(pure)(state, X)
    nnx.update(model, state)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_a_model_computes_in_16_bits_and_keeps_its_state(way):
    expected, model = Net(), Net()
    plain = [expected(X), expected(X)]
    for wanted in plain:
        result = WAYS[way](model)
        assert result.dtype == jnp.float16
        near(result.astype(jnp.float32), wanted)
    near(changing(model), changing(expected))
    assert model.dropout.rngs.count[...] == 2


# Inside, gradients are results like all others, and keep the dtype of their matmul.
float32_results = functools.partial(gpu, output_dtype=jnp.float32)
TRANSFORMS = {
    "value_and_grad_outside": lambda: nnx.value_and_grad(gpu(loss)),
    "value_and_grad_inside": lambda: float32_results(nnx.value_and_grad(loss)),
    "jit_outside": lambda: nnx.jit(nnx.value_and_grad(gpu(loss))),
    "jit_inside": lambda: float32_results(nnx.jit(nnx.value_and_grad(loss))),
}


@pytest.mark.parametrize("bound", [False, True], ids=["argument", "function"])
def test_eager_calls_of_a_module_trace_once_for_each_structure_of_arguments(bound):
    linear, traces = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), []

    def apply(model, inputs):
        traces.append([*inputs])
        return model(inputs["x"] if "x" in inputs else -inputs["y"])

    fn = gpu(lambda inputs: apply(linear, inputs)) if bound else gpu(apply)
    given = () if bound else (linear,)
    results = [fn(*given, {name: X}) for name in ("x", "y", "x", "y")]
    assert traces == [["x"], ["y"]]
    np.testing.assert_array_equal(results[0], results[2])
    near(results[1], -results[0].astype(jnp.float32).astype(jnp.float16))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_float32_and_the_state_is_updated(transform):
    expected, model = Net(), Net()
    wanted = nnx.value_and_grad(loss)(expected, X, Y)
    value, gradients = TRANSFORMS[transform]()(model, X, Y)
    near((value, gradients), wanted, 0.05)
    near(changing(model), changing(expected))
    assert model.dropout.rngs.count[...] == 1


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit], ids=["eager", "jit"])
def test_scaled_gradients_of_a_model_are_those_of_nnx_and_its_state_is_kept(jit):
    expected, model = Net(), Net()
    wanted_value, wanted = nnx.value_and_grad(loss)(expected, X, Y)
    state = jamp.GradScaler(init_scale=8.0).init()

    def with_aux(x, model):
        return loss(model, x, Y), x

    differentiate = jit(jamp.value_and_grad(gpu(loss)))
    value, gradients = differentiate(state, model, X, Y)
    assert jax.tree.structure(gradients) == jax.tree.structure(wanted)
    near(
        (value, jax.tree.map(lambda leaf: leaf / 8, gradients)),
        (wanted_value, wanted),
        0.05,
    )
    near(changing(model), changing(expected))
    # A module that is not differentiated keeps its state too.
    jamp.value_and_grad(gpu(with_aux), has_aux=True)(state, X, model=model)
    with_aux(X, model=expected)
    near(changing(model), changing(expected))


@pytest.mark.parametrize("wrap", [lambda fn: fn, gpu], ids=["plain", "autocast"])
def test_scaled_gradients_of_a_partial_with_keywords_are_those_of_nnx(wrap):
    expected, model = Net(), Net()
    bound = functools.partial(loss, x=X, y=Y)
    wanted_value, wanted = nnx.value_and_grad(bound)(expected)
    state = jamp.GradScaler(init_scale=8.0).init()
    value, gradients = jamp.value_and_grad(wrap(bound))(state, model)
    unscaled = jax.tree.map(lambda leaf: leaf / 8, gradients)
    near((value, unscaled), (wanted_value, wanted), 0.05)
    near(changing(model), changing(expected))


def test_scaled_gradients_beside_random_streams_keep_their_counters():
    def noisy(params, rngs):
        noise = jax.random.normal(rngs.noise(), params["w"].shape)
        return jnp.sum(params["w"] * noise)

    params = {"w": jnp.ones(4)}
    expected, rngs = nnx.Rngs(0), nnx.Rngs(0)
    state = jamp.GradScaler(init_scale=8.0).init()
    for _ in range(2):
        value, gradients = jamp.value_and_grad(gpu(noisy))(state, params, rngs)
        wanted_value, wanted = nnx.value_and_grad(noisy)(params, expected)
        near((value, gradients["w"] / 8), (wanted_value, wanted["w"]))
    assert rngs.default.count[...] == expected.default.count[...] == 2


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_module_that_a_call_leaves_as_it_is_may_be_transformed(transform):
    layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    result = transform(gpu(layer))(X)
    assert result.dtype == jnp.float16
    near(result.astype(jnp.float32), layer(X))


def test_grad_of_a_model_returns_its_state_as_nnx_does():
    gradients = nnx.grad(gpu(loss))(Net(), X, Y)
    near(gradients, nnx.grad(loss)(Net(), X, Y), 0.05)
    assert set(jax.tree.leaves(dtypes(gradients))) == {"float32"}


def test_scan_and_vmap_of_nnx_stand_around_autocast():
    layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    step = lambda x, layer: jnp.tanh(layer(x))  # noqa: E731
    over = functools.partial(
        nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, length=3
    )
    wrapped = gpu(step, output_dtype=jnp.float32)
    near(over(wrapped)(X, layers), over(step)(X, layers))
    each = nnx.vmap(gpu(lambda layer, x: layer(x)), in_axes=(0, None))
    result = each(layers, X)
    assert result.dtype == jnp.float16
    wanted = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, X)
    near(result.astype(jnp.float32), wanted)


@pytest.mark.parametrize("around", ["inside", "outside"])
def test_a_cond_of_nnx_updates_the_module_of_its_branch(around):
    expected, model = Net(), Net()
    branches = (lambda m, x: m(x), lambda m, x: m.second(m.first(x)))

    def chosen(model, x, wrap=lambda fn: fn):
        return nnx.cond(x[0, 0] < 9, *map(wrap, branches), model, x)

    wanted = chosen(expected, X)
    if around == "inside":
        result = gpu(chosen)(model, X)
    else:
        result = chosen(model, X, gpu)
    near(result.astype(jnp.float32), wanted)
    near(changing(model), changing(expected))


def test_training_with_an_optimizer_of_nnx_follows_float32():
    losses = {}
    for name, function in {"float32": loss, "autocast": gpu(loss)}.items():
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, function=function):
            value, gradients = nnx.value_and_grad(function)(model, X, Y)
            optimizer.update(model, gradients)
            return value

        losses[name] = [float(step(model, optimizer)) for _ in range(10)]
        assert set(jax.tree.leaves(dtypes(nnx.state(model, nnx.Param)))) == {"float32"}
        assert optimizer.step[...] == 10
        assert model.dropout.rngs.count[...] == 10
    np.testing.assert_allclose(losses["autocast"], losses["float32"], rtol=0.05)
    assert losses["autocast"][-1] < 0.7 * losses["autocast"][0]


def test_the_whole_training_step_may_run_under_autocast():
    model, expected = Net(), Net()

    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    make = functools.partial(nnx.Optimizer, tx=optax.sgd(0.1), wrt=nnx.Param)
    optimizer = make(model)
    value = gpu(step)(model, optimizer, X, Y)
    near(value, step(expected, make(expected), X, Y))
    near(nnx.state(model, nnx.Param), nnx.state(expected, nnx.Param))
    near(changing(model), changing(expected))
    assert optimizer.step[...] == 1


def test_a_shared_layer_stays_shared_and_is_cast_once():
    model = constructs.Language(nnx.Rngs(0))
    tokens = jnp.array([[1, 5, 2, 0]])
    result = gpu(model)(tokens)
    assert model.first is model.second
    assert result.dtype == jnp.float16
    near(result.astype(jnp.float32), model(tokens))
    gradients = nnx.grad(gpu(lambda model: jnp.sum(model(tokens) ** 2)))(model)
    assert "second" not in gradients or not gradients["second"]


def test_a_cache_filled_under_autocast_is_read_under_autocast():
    attention, expected = (constructs.decoder(nnx.Rngs(0)) for _ in range(2))
    tokens = jax.random.normal(jax.random.key(2), (2, 5, 4))
    step = gpu(lambda attention, token: attention(token, decode=True))
    for i in range(5):
        near(
            step(attention, tokens[:, [i]]).astype(jnp.float32),
            expected(tokens[:, [i]], decode=True),
        )
    near(nnx.state(attention, nnx.Cache), nnx.state(expected, nnx.Cache))
    assert attention.cache_index[...] == 5


def test_intermediates_are_captured_in_the_dtype_they_were_computed_in():
    model = constructs.Sown(nnx.Rngs(0))
    forward = nnx.capture(lambda model, x: model(x), nnx.Intermediate)
    _, captured = gpu(forward)(model, X)
    _, expected = forward(model, X)
    (hidden,) = jax.tree.leaves(captured)
    assert hidden.dtype == jnp.float16
    near(hidden.astype(jnp.float32), *jax.tree.leaves(expected))


def test_train_and_eval_mode_are_seen_at_the_next_call():
    model = Net()
    fn = gpu(lambda model, x: model(x))
    model.eval()
    first, second = fn(model, X), fn(model, X)
    np.testing.assert_array_equal(first, second)
    assert model.dropout.rngs.count[...] == 0
    model.train()
    assert not np.array_equal(fn(model, X), first)
    assert model.dropout.rngs.count[...] == 1


def test_statistics_of_linen_stay_float32_and_follow_float32():
    module = ConvBlock()
    images = jax.random.normal(jax.random.key(0), (4, 5, 5, 3))
    variables = expected = module.init(jax.random.key(1), images)

    def step(variables, images):
        return module.apply(variables, images, mutable=["batch_stats"])

    for _ in range(4):
        result, updates = gpu(step)(variables, images)
        assert result.dtype == jnp.float16
        variables = {**variables, **updates}
        expected = {**expected, **step(expected, images)[1]}
    near(variables, expected, 2e-3)

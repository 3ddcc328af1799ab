"""Every construct runs under autocast, forward and backward, under jit and vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import CONSTRUCTS, derivatives, linen, loops, nnx, other_libraries
from jaxprs import dtypes, is_float, matmul_dtypes, traced

import jamp

LOW = {"gpu": "float16", "cpu": "bfloat16"}
# Sixteen roundings of the dtype, relative to the largest value of a result.
TOLERANCE = {"gpu": 16 * 2.0**-11, "cpu": 16 * 2.0**-8}

NAMED = {construct.name: construct for construct in CONSTRUCTS}

each_device = pytest.mark.parametrize("device", LOW)

# The whole matrix is a long run. These are in the default one from end to end; of the
# others it has the gradients on gpu, or what there is without one. On cpu, and for the
# gradients of layers, it only traces: values go through the same rules in the other
# dtype, and tests/transform/test_models.py trains with layers of the same libraries.
CORE = (*loops.CONSTRUCTS, *derivatives.CONSTRUCTS)
LAYERS = (*linen.CONSTRUCTS, *nnx.CONSTRUCTS, *other_libraries.CONSTRUCTS)


def every(refused=None):
    """Parametrizes a test by devices and the constructs that JAX does not refuse.

    Args:
        refused: The field of `Construct` that says so.

    A test gets the name, the device, and whether to compute values or only to trace.
    """
    cases = []
    for construct in CONSTRUCTS:
        if refused is not None and getattr(construct, refused):
            continue
        short = refused == "no_gradient" or (refused is None and construct.no_gradient)
        for device in LOW:
            quick = construct in CORE or (short and device == "gpu")
            layer = construct in LAYERS and refused == "no_gradient"
            name = f"{construct.name}-{device}"
            if traced_only := quick and (layer or device == "cpu"):
                case = pytest.param(construct.name, device, False, id=f"{name}-traced")
                cases.append(case)
            marks = () if quick and not traced_only else pytest.mark.slow
            cases.append(
                pytest.param(construct.name, device, True, marks=marks, id=name)
            )
    return pytest.mark.parametrize(("name", "device", "computed"), cases)


def cast(fn, device):
    return jamp.autocast(fn, device_type=device)


def split(tree):
    """The floating leaves of a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_float(leaf)]

    def merged(floats):
        filled = dict(zip(places, floats, strict=True))
        return structure.unflatten(filled.get(i, leaf) for i, leaf in enumerate(leaves))

    return [leaves[place] for place in places], merged


def weighed(result):
    """A float32 sum of a result's leaves in which no two elements weigh the same."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(result):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weights = np.cos(np.arange(leaf.size, dtype=np.float32))
            values = jnp.real(leaf).astype(jnp.float32)
            total += jnp.sum(values * weights.reshape(leaf.shape))
    return total


def gradient(fn, arguments):
    """The gradient of `fn` at the floating leaves of the arguments, and these."""
    floats, merged = split(arguments)
    return jax.grad(lambda floats: weighed(fn(*merged(floats)))), floats


def batched(arguments):
    """Two of the arguments, the second upside down."""
    return jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf]), arguments
    )


@functools.cache
def call(name, what, device, computed):
    """A construct's value, gradient or batch as a jitted function, and its arguments.

    Args:
        name: The construct.
        what: Which of the three.
        device: Where it is under autocast; None for float32.
        computed: Whether there are values, or mere shapes to trace with.
    """
    construct = NAMED[name]
    fn = construct.fn if device is None else cast(construct.fn, device)
    arguments = construct.arguments() if computed else construct.shapes()
    if what == "gradient":
        fn, floats = gradient(fn, arguments)
        return jax.jit(fn), (floats,)
    if what == "batch":
        batch = batched(arguments) if computed else jax.eval_shape(batched, arguments)
        return jax.jit(jax.vmap(fn)), batch
    return jax.jit(fn), arguments


@functools.cache
def compiled(name, device, kinds):
    """Of each kind what a construct gives under autocast, and in float32.

    All is one program: to compile it takes less time than to compile its parts.
    """
    pairs = {
        what: (call(name, what, device, True), call(name, what, None, True))
        for what in kinds
    }

    def run(given):
        return {
            what: tuple(fn(*given[what]) for fn, _ in pair)
            for what, pair in pairs.items()
        }

    return jax.jit(run)({what: pair[0][1] for what, pair in pairs.items()})


def results(name, what, device):
    """What a construct gives under autocast and in float32, compiled."""
    construct, kinds = NAMED[name], (what,)
    if construct in CORE:
        refused = {"gradient": construct.no_gradient, "batch": construct.no_vmap}
        kinds = ("value", *(what for what, why in refused.items() if not why))
    return compiled(name, device, kinds)[what]


def error(actual, expected):
    """The largest difference, each leaf's relative to its largest value, or to 0.1."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    worst = 0.0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(leaf).astype(complex) for leaf in (x, y))
        assert x.shape == y.shape
        if x.size:
            worst = max(worst, np.abs(x - y).max() / max(0.1, np.abs(y).max()))
    return worst


def assert_lowered(program, device, kept=0):
    found = matmul_dtypes(program)
    low = (LOW[device], LOW[device])
    others = [pair for pair in found if pair != low]
    assert found
    assert others == [("float32", "float32")] * kept


@every()
def test_it_runs_in_16_bits(name, device, computed):
    fn, arguments = call(name, "value", device, computed)
    assert_lowered(fn.trace(*arguments).jaxpr, device, NAMED[name].kept)
    if computed:
        actual = cast(NAMED[name].fn, device)(*arguments)
        _, expected = results(name, "value", device)
        assert error(actual, expected) < TOLERANCE[device]


@every()
def test_a_jit_outside_changes_nothing(name, device, computed):
    fn, arguments = call(name, "value", device, computed)
    without = jax.eval_shape(cast(NAMED[name].fn, device), *arguments)
    assert dtypes(jax.eval_shape(fn, *arguments)) == dtypes(without)
    if computed:
        actual, expected = results(name, "value", device)
        assert dtypes(actual) == dtypes(without)
        assert error(actual, expected) < TOLERANCE[device]


@every("no_gradient")
def test_its_gradient_runs_in_16_bits(name, device, computed):
    fn, (floats,) = call(name, "gradient", device, computed)
    assert_lowered(fn.trace(floats).jaxpr, device, NAMED[name].kept_backward)
    assert dtypes(jax.eval_shape(fn, floats)) == dtypes(floats)
    if computed:
        actual, expected = results(name, "gradient", device)
        assert dtypes(actual) == dtypes(floats)
        assert error(actual, expected) < TOLERANCE[device]


@every("no_vmap")
def test_a_vmap_outside_batches_it(name, device, computed):
    fn, batch = call(name, "batch", device, computed)
    assert_lowered(fn.trace(*batch).jaxpr, device, NAMED[name].kept)
    once, arguments = call(name, "value", device, computed)
    of_one = dtypes(jax.eval_shape(once, *arguments))
    assert dtypes(jax.eval_shape(fn, *batch)) == of_one
    if computed:
        actual, expected = results(name, "batch", device)
        assert dtypes(actual) == of_one
        assert error(actual, expected) < TOLERANCE[device]


@pytest.mark.parametrize("name", NAMED)
def test_a_disabled_region_holds_inside_it(name):
    construct = NAMED[name]

    def fn(*arguments):
        with jamp.autocast(enabled=False):
            return construct.fn(*arguments)

    shapes = construct.shapes() if construct in LAYERS else construct.arguments()
    program = traced(cast(fn, "gpu"), *shapes)
    assert set(matmul_dtypes(program)) == {("float32", "float32")}


# What JAX says where it refuses a gradient, or a batch.
REFUSALS = {
    "no_gradient": "Reverse-mode differentiation does not work|Linearization failed|"
    "Differentiation rule|not support JVP|cannot be differentiated",
    "no_vmap": "Batching rule|Cannot `vmap`|vmap is only supported|vmap over any dim|"
    "not supported in vmap",
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_is_said_to_be_refused_is_refused_by_jax(refused):
    for construct in CONSTRUCTS:
        if not getattr(construct, refused):
            continue
        arguments = construct.arguments()
        batch = jax.tree.map(lambda leaf: leaf[None], arguments)
        gradient_of, floats = gradient(construct.fn, arguments)
        attempt = {
            "no_gradient": functools.partial(gradient_of, floats),
            "no_vmap": functools.partial(jax.vmap(construct.fn), *batch),
        }[refused]
        with pytest.raises((ValueError, NotImplementedError), match=REFUSALS[refused]):
            attempt()


def test_a_result_that_is_off_is_found():
    arguments = NAMED["scan"].arguments()
    right = NAMED["scan"].fn(*arguments)
    assert error(jax.tree.map(lambda leaf: leaf * 1.2, right), right) > 0.15

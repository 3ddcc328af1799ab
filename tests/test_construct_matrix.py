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
# dtype, and tests/test_models.py trains with layers of the same libraries.
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
            values = jnp.real(leaf).astype(jnp.float32).ravel()
            total += jnp.sum(values * jnp.cos(jnp.arange(values.size)))
    return total


def gradient(fn, construct):
    """The gradient of `fn` at the floating leaves of the arguments, as a function."""
    floats, merged = split(construct.arguments())
    return jax.grad(lambda floats: weighed(fn(*merged(floats)))), floats


def batched(arguments):
    """Two of the arguments, the second upside down."""
    return jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf]), arguments
    )


@functools.cache
def expected(name, what):
    """What a construct gives in float32; both devices and several tests share it."""
    construct = NAMED[name]
    arguments = construct.arguments()
    if what == "gradient":
        fn, floats = gradient(construct.fn, construct)
        return jax.jit(fn)(floats)
    if what == "batch":
        return jax.jit(jax.vmap(construct.fn))(*batched(arguments))
    return jax.jit(construct.fn)(*arguments)


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
    construct = NAMED[name]
    arguments = construct.arguments()
    fn = cast(construct.fn, device)
    assert_lowered(traced(fn, *arguments), device, construct.kept)
    if computed:
        assert error(fn(*arguments), expected(name, "value")) < TOLERANCE[device]


@every()
def test_a_jit_outside_changes_nothing(name, device, computed):
    construct = NAMED[name]
    arguments = construct.arguments()
    fn = cast(construct.fn, device)
    compiled = jax.jit(fn)
    result = compiled(*arguments) if computed else jax.eval_shape(compiled, *arguments)
    assert dtypes(result) == dtypes(jax.eval_shape(fn, *arguments))
    if computed:
        assert error(result, expected(name, "value")) < TOLERANCE[device]


@every("no_gradient")
def test_its_gradient_runs_in_16_bits(name, device, computed):
    construct = NAMED[name]
    fn, floats = gradient(cast(construct.fn, device), construct)
    compiled = jax.jit(fn)
    assert_lowered(compiled.trace(floats).jaxpr, device, construct.kept_backward)
    actual = compiled(floats) if computed else jax.eval_shape(compiled, floats)
    assert dtypes(actual) == dtypes(floats)
    if computed:
        assert error(actual, expected(name, "gradient")) < TOLERANCE[device]


@every("no_vmap")
def test_a_vmap_outside_batches_it(name, device, computed):
    construct = NAMED[name]
    arguments = construct.arguments()
    batch = batched(arguments)
    fn = cast(construct.fn, device)
    compiled = jax.jit(jax.vmap(fn))
    assert_lowered(compiled.trace(*batch).jaxpr, device, construct.kept)
    actual = compiled(*batch) if computed else jax.eval_shape(compiled, *batch)
    assert dtypes(actual) == dtypes(jax.eval_shape(fn, *arguments))
    if computed:
        assert error(actual, expected(name, "batch")) < TOLERANCE[device]


@pytest.mark.parametrize("name", NAMED)
def test_a_disabled_region_holds_inside_it(name):
    construct = NAMED[name]

    def fn(*arguments):
        with jamp.autocast(enabled=False):
            return construct.fn(*arguments)

    program = traced(cast(fn, "gpu"), *construct.arguments())
    assert set(matmul_dtypes(program)) == {("float32", "float32")}


@pytest.mark.parametrize("refused", ["no_gradient", "no_vmap"])
def test_what_is_said_to_be_refused_is_refused_by_jax(refused):
    for construct in CONSTRUCTS:
        if not getattr(construct, refused):
            continue
        arguments = construct.arguments()
        batch = jax.tree.map(lambda leaf: leaf[None], arguments)
        gradient_of, floats = gradient(construct.fn, construct)
        attempt = {
            "no_gradient": functools.partial(gradient_of, floats),
            "no_vmap": functools.partial(jax.vmap(construct.fn), *batch),
        }[refused]
        with pytest.raises(Exception):  # noqa: B017
            attempt()


def test_a_result_that_is_off_is_found():
    arguments = NAMED["scan"].arguments()
    right = NAMED["scan"].fn(*arguments)
    assert error(jax.tree.map(lambda leaf: leaf * 1.2, right), right) > 0.15

"""The kernels that unscale and check gradients: the same bits as plain JAX gives."""

import contextlib
import functools

import gradient_trees
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jamp.pallas_kernels.unscale import backends, reference, with_kernel
from jamp.pallas_kernels.unscale.launches import Request

pytestmark = [
    # At every compilation JAX announces the end of its Triton backend.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

INV_SCALE = np.float32(1 / 1536)
# The largest float16, the smallest normal and a denormal of float32, of float16 and of
# bfloat16, zeros of both signs.
NUMBERS = (65504.0, -65504.0, 1.2e-38, 1e-40, 6.1e-5, 6e-8, 9e-41, 0.0, -0.0, 3e38)
DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


# Tiny leaves among large ones, more than the launches below take.
SOME = functools.partial(gradient_trees.large_and_tiny, 20)


@pytest.fixture(params=backends.KERNELS)
def kernel(request, monkeypatch):
    """A kernel whose launches take few leaves: more would take longer to compile."""
    kernel = load(request.param)
    monkeypatch.setattr(kernel, "MOST_LEAVES", 16)
    return kernel


def load(name):
    try:
        return backends.load(name)
    except ImportError as reason:
        pytest.skip(str(reason))


def run(kernel, leaves, inv_scale=INV_SCALE, **options):
    """Runs a kernel in interpret mode, on the leaves that it takes."""
    request = Request(interpret=True, **options)
    taken = [leaf for leaf in leaves if kernel.takes(leaf)]
    return taken, *compiled(kernel, taken, jnp.float32(inv_scale), request)


@functools.partial(jax.jit, static_argnums=(0, 3))
def compiled(kernel, leaves, inv_scale, request):
    return kernel.run(leaves, inv_scale, request)


compiled_reference = jax.jit(reference.run, static_argnums=2)


def bits(array):
    return np.asarray(array).tobytes()


def filled(tree, seed=0):
    """Random arrays for a tree, with awkward numbers in them."""
    rng = np.random.default_rng(seed)
    leaves = []
    for leaf in jax.tree.leaves(tree):
        array = rng.standard_normal(leaf.shape) * 100
        awkward = rng.random(leaf.shape) < 0.05
        array = np.where(awkward, rng.choice(NUMBERS[:-1], leaf.shape), array)
        leaves.append(jax.device_put(array.astype(leaf.dtype)))
    return leaves


def with_number(leaf, position, value):
    """A leaf with another number in one place; NumPy compiles nothing for it."""
    array = np.array(leaf)
    array.reshape(-1)[position] = value
    return jax.device_put(array)


def assert_as_reference(kernel, leaves, inv_scale=INV_SCALE):
    taken, unscaled, not_finite = run(kernel, leaves, inv_scale)
    expected, found = compiled_reference(taken, jnp.float32(inv_scale), Request())
    assert [bits(leaf) for leaf in unscaled] == [bits(leaf) for leaf in expected]
    assert [leaf.shape for leaf in unscaled] == [leaf.shape for leaf in taken]
    assert (not_finite > 0) == (found > 0)
    return not_finite


@pytest.mark.parametrize("tree", [gradient_trees.mixed, SOME], ids=["mixed", "tiny"])
def test_leaves_of_every_shape_come_out_bit_for_bit(kernel, tree):
    leaves = filled(tree())
    assert assert_as_reference(kernel, leaves) == 0
    assert any(kernel.takes(leaf) for leaf in leaves)


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_come_out_bit_for_bit(kernel, dtype):
    with np.errstate(over="ignore"):
        numbers = np.resize(np.asarray(NUMBERS, np.float32), 128).astype(dtype)
    assert_as_reference(kernel, [jax.device_put(numbers)])


def test_the_check_alone_finds_what_overflows_when_unscaled(kernel):
    leaves = filled(SOME())
    for inv_scale in (1.0, 2.0**126):
        taken, none, not_finite = run(kernel, leaves, inv_scale, unscale=False)
        _, found = compiled_reference(taken, jnp.float32(inv_scale), Request())
        assert none == []
        assert (not_finite > 0) == (found > 0) == (inv_scale > 1)


POISONS = (np.inf, -np.inf, np.nan)
LEAVES = {"first": 0, "middle": 10, "last": -1}


# The default run has each value, and each leaf, once.
POISONINGS = [
    pytest.param(
        value,
        LEAVES[name],
        marks=() if i == j else pytest.mark.slow,
        id=f"{value}-{name}",
    )
    for i, value in enumerate(POISONS)
    for j, name in enumerate(LEAVES)
]


@pytest.mark.numbers
@pytest.mark.parametrize(("value", "leaf"), POISONINGS)
def test_one_number_that_is_not_finite_is_found_anywhere(kernel, value, leaf):
    leaves = filled(SOME())
    leaves = [x for x in leaves if kernel.takes(x)]
    for position in (0, leaves[leaf].size // 2, -1):
        poisoned = list(leaves)
        poisoned[leaf] = with_number(leaves[leaf], position, value)
        for options in ({}, {"unscale": False}):
            assert run(kernel, poisoned, **options)[-1] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_overflows_by_unscaling_is_found(kernel, dtype):
    largest = float(jnp.finfo(dtype).max)
    leaves = [jnp.full(64, largest, dtype)]
    assert run(kernel, leaves, inv_scale=1.0)[-1] == 0
    assert run(kernel, leaves, inv_scale=4.0)[-1] > 0
    assert_as_reference(kernel, leaves, inv_scale=4.0)


def test_the_check_alone_reads_and_writes_nothing(kernel):
    leaves = filled(SOME())
    _, unscaled, not_finite = run(kernel, leaves, unscale=False)
    assert unscaled == []
    assert not_finite == 0


@pytest.mark.numbers
@pytest.mark.parametrize(("name", "multiple"), [("triton", 1), ("mosaic_gpu", 64)])
def test_random_trees_come_out_bit_for_bit(name, multiple):
    kernel = load(name)

    @settings(max_examples=12, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 9000 // multiple), min_size=1, max_size=5),
        dtype=st.sampled_from(DTYPES),
        poison=st.sampled_from([None, np.inf, np.nan]),
        seed=st.integers(0, 2**16),
    )
    def check(sizes, dtype, poison, seed):
        tree = [jax.ShapeDtypeStruct((size * multiple,), dtype) for size in sizes]
        leaves = filled(tree, seed)
        if poison is not None:
            leaf = seed % len(leaves)
            leaves[leaf] = with_number(leaves[leaf], seed % leaves[leaf].size, poison)
        assert (assert_as_reference(kernel, leaves) > 0) == (poison is not None)

    check()


@contextlib.contextmanager
def hopper():
    """JAX from 0.11 on asks what to compile for; 0.10 assumes a GPU of Hopper."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        yield
        return
    device = jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("gpus",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def lowered(kernel, tree, **options):
    """The program that a kernel makes for a GPU, as text."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if kernel.takes(leaf)]
    request = Request(**options)
    step = jax.jit(
        lambda leaves, scale: kernel.run(leaves, scale, request),
        donate_argnums=0 if request.unscale else (),
    )
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    with hopper():
        return step.trace(leaves, scale).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("options", [{}, {"unscale": False}], ids=str)
def test_the_kernels_lower_for_a_gpu_where_there_is_none(kernel, options):
    text = lowered(kernel, gradient_trees.mixed(), **options)
    # A launch for each dtype.
    assert text.count("stablehlo.custom_call @") == 3


@pytest.mark.parametrize(("name", "launches"), [("triton", 3), ("mosaic_gpu", 10)])
def test_the_gradients_of_a_gpt2_take_few_launches_in_place(name, launches):
    tree = gradient_trees.gpt2()
    text = lowered(load(name), tree)
    assert text.count("stablehlo.custom_call @") == launches
    assert text.count("stablehlo.output_operand_alias") == len(tree)


def test_the_kernel_gives_way_to_plain_jax_under_vmap_and_grad():
    triton = load("triton")
    request = Request(interpret=True)
    leaves = [jnp.arange(1.0, 65.0).reshape(4, 16)]

    def unscaled(leaves, scale):
        return with_kernel(triton, leaves, scale, request)

    batched, not_finite = jax.vmap(unscaled, in_axes=(0, None))(leaves, 0.5)
    np.testing.assert_array_equal(batched[0], leaves[0] * 0.5)
    assert not_finite.shape == (4,)
    gradient = jax.grad(lambda x: jnp.sum(unscaled(x, 0.5)[0][0] ** 2))(leaves)
    np.testing.assert_allclose(gradient[0], 2 * 0.25 * leaves[0], rtol=1e-6)

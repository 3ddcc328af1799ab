"""Unscaling at its public surface: choice of a kernel, dtypes, donation, shards."""

import contextlib
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gradient_trees import mixed
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from jamp.pallas_kernels import all_finite, unscale, unscale_and_check
from jamp.pallas_kernels.unscale import backends, reference, with_kernel
from jamp.pallas_kernels.unscale.launches import Request

ON_CPU = Request(interpret=True)


def test_every_dtype_keeps_its_own_and_others_pass_through():
    tree = {
        "bfloat16": jnp.ones(3, jnp.bfloat16),
        "float8": jnp.ones(3, ml_dtypes.float8_e5m2),
        "complex": jnp.ones(3, jnp.complex64),
        "integer": jnp.arange(3),
        "empty": jnp.zeros((0, 4)),
        "nothing": None,
    }
    with jax.enable_x64(True):
        tree["float64"] = jnp.full(3, 1 / 3, jnp.float64)
        unscaled, found = unscale_and_check(tree, 0.5)
        assert unscaled["float64"][0] == 1 / 6
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree)
    assert jax.tree.map(lambda leaf: leaf.dtype, unscaled) == dtypes
    np.testing.assert_array_equal(unscaled["integer"], [0, 1, 2])
    assert not found


def test_donated_gradients_are_overwritten_in_place():
    grads = [jnp.ones((64, 64)), jnp.ones(17, jnp.bfloat16)]
    step = jax.jit(lambda grads: unscale_and_check(grads, 0.5), donate_argnums=0)
    memory = step.lower(grads).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 64 * 4 + 17 * 2


def test_a_kernel_that_cannot_run_here_says_why():
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU.*'auto' and"):
        unscale_and_check({"w": jnp.ones(3)}, 1.0, implementation="triton")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        all_finite({"w": jnp.ones(3)}, implementation="mosaic_gpu")


def test_the_fastest_is_that_of_the_nearest_measured_size():
    table = [(2**20, "xla"), (2**26, "triton"), (2**30, "mosaic_gpu")]
    assert backends.nearest(table, 0) == "xla"
    assert backends.nearest(table, 2**22) == "xla"
    assert backends.nearest(table, 2**24) == "triton"
    assert backends.nearest(table, 2**40) == "mosaic_gpu"
    assert backends.nearest([], 2**20) == "xla"


@pytest.mark.parametrize("kernel", backends.KERNELS)
def test_what_is_fastest_is_not_chosen_for_a_program_of_another_device(
    kernel, monkeypatch
):
    try:
        module = backends.load(kernel)
    except ImportError as reason:
        pytest.skip(str(reason))
    monkeypatch.setattr(unscale, "fastest", lambda leaves: module)
    grads = {"w": jnp.full((8, 64), 3.0), "b": jnp.array([1.0, jnp.inf])}
    for run in (unscale_and_check, jax.jit(lambda *args: unscale_and_check(*args))):
        unscaled, found = run(grads, 0.5)
        assert found
        np.testing.assert_array_equal(unscaled["w"], 1.5)
    assert all_finite({"w": grads["w"]})


@pytest.fixture
def measured_card(monkeypatch):
    """A card that is the default device, and of which Triton is the fastest."""
    card, cpus = SimpleNamespace(platform="gpu", device_kind="A Card"), jax.devices()
    known = {"fastest": {"A Card": [[1, "triton"]]}}
    monkeypatch.setattr(backends, "measured", lambda: known)
    monkeypatch.setattr(backends, "why_not", lambda implementation: [])
    monkeypatch.setattr(
        backends.jax, "devices", lambda platform=None: cpus if platform else [card]
    )


@pytest.mark.usefixtures("measured_card")
def test_what_was_the_fastest_is_in_programs_for_gpus_and_compiles_without_a_warning():
    def step(grads):
        unscaled, found = unscale_and_check(grads, 0.5)
        return unscaled, found

    traced = jax.jit(step).trace({"w": jnp.ones((300, 64))})
    assert "all_finite" in str(traced.jaxpr)  # and XLA unscales
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = jax.jit(step).trace({"w": jnp.ones((300, 65))})
        try:
            traced.lower(lowering_platforms=("cuda",))
        except RuntimeError as error:
            # From JAX 0.11 on it asks for the GPU, after it would have warned.
            assert "No supported GPU" in str(error)
        elsewhere = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "all_finite" not in elsewhere


@pytest.mark.usefixtures("measured_card")
def test_what_chooses_a_kernel_leaves_the_warnings_of_others_alone():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(4):
            backends.fastest([jnp.ones(64)])
            warnings.warn("once a line", UserWarning, stacklevel=1)
    assert len(shown) == 1


@pytest.mark.usefixtures("measured_card")
@pytest.mark.parametrize("device", ["cpu", jax.devices("cpu")[0]], ids=str)
def test_a_program_traced_for_another_device_is_exported_without_a_kernel(device):
    step = jax.jit(lambda grads: unscale_and_check(grads, 0.5))
    with jax.default_device(device):
        exported = jax.export.export(step, platforms=["cpu", "cuda"])(jnp.ones((8, 64)))
    unscaled, found = jax.export.deserialize(exported.serialize()).call(
        jnp.full((8, 64), 3.0)
    )
    np.testing.assert_array_equal(unscaled, 1.5)
    assert not found


@pytest.mark.usefixtures("measured_card")
def test_gradients_of_symbolic_sizes_are_unscaled_by_xla():
    step = jax.jit(lambda grads: unscale_and_check(grads, 0.5))
    shape = jax.export.symbolic_shape("rows, 64")
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    exported = jax.export.export(step, platforms=["cuda"])(leaf)
    assert "all_finite" not in exported.mlir_module()


def test_the_scaler_finds_what_the_reference_finds():
    grads = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}
    scaler = jamp.GradScaler()
    _, found = scaler.unscale(scaler.init(), grads)
    assert found


def mesh(kind):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def sharded(mesh, poison=None):
    """Leaves whole on every device, halved, and cut in eight."""
    leaves = [
        jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
        for shape in [(48,), (8, 24), (16, 8, 4)]
        for dtype in (jnp.float32, jnp.float16)
    ]
    if poison is not None:
        leaves[-1] = leaves[-1].at[-1, -1, -1].set(poison)
    specs = {1: P(), 2: P("x", None), 3: P("x", "y")}
    return [
        jax.device_put(leaf, NamedSharding(mesh, specs[leaf.ndim])) for leaf in leaves
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("poison", [None, np.inf])
def test_each_device_unscales_its_own_shards_and_only_findings_travel(kind, poison):
    kernel = backends.load("triton")
    explicit = kind == AxisType.Explicit
    with jax.set_mesh(mesh(kind)) if explicit else contextlib.nullcontext():
        leaves = sharded(mesh(kind), poison)
        compiled = with_kernel.lower(kernel, leaves, jnp.float32(0.3), ON_CPU).compile()
        unscaled, not_finite = compiled(leaves, jnp.float32(0.3))
        expected, found = reference.run(leaves, jnp.float32(0.3), ON_CPU)
    text = compiled.as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute"))
    assert " all-reduce(" in text
    for leaf, result, value in zip(leaves, unscaled, expected, strict=True):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_array_equal(result, value)
    assert (not_finite > 0) == (poison is not None) == (found > 0)


def test_shards_of_a_size_that_the_kernel_cannot_take_are_done_by_xla(monkeypatch):
    kernel = backends.load("triton")
    monkeypatch.setattr(kernel, "takes", lambda leaf: leaf.size % 64 == 0)
    devices = mesh(AxisType.Auto)
    cut = NamedSharding(devices, P("x"))
    # 192 numbers in shards of 48, which is refused, and 256 in shards of 64.
    leaves = [jax.device_put(jnp.ones(size), cut) for size in [(8, 24), (8, 32)]]
    unscaled, not_finite = with_kernel(kernel, leaves, jnp.float32(0.5), ON_CPU)
    assert [float(leaf.sum()) for leaf in unscaled] == [96, 128]
    assert not_finite == 0
    poisoned = [leaves[0].at[7, 23].set(jnp.nan), leaves[1].at[0, 0].set(jnp.inf)]
    for pair in ([poisoned[0], leaves[1]], [leaves[0], poisoned[1]]):
        placed = [jax.device_put(leaf, cut) for leaf in pair]
        assert with_kernel(kernel, placed, jnp.float32(0.5), ON_CPU)[1] > 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_check_alone_finds_what_one_shard_holds(kind):
    request = Request(unscale=False, interpret=True)
    with jax.set_mesh(mesh(kind)):
        for poison in (None, np.nan):
            leaves = sharded(mesh(kind), poison)[-2:]
            run = with_kernel(backends.load("triton"), leaves, jnp.float32(1), request)
            assert run[0] == []
            assert (run[1] > 0) == (poison is not None)


def test_the_reference_keeps_shards_where_they_are_too():
    leaves = sharded(mesh(AxisType.Auto))
    compiled = jax.jit(unscale_and_check).lower(leaves, 0.3).compile()
    text = compiled.as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute"))


def test_inside_a_shard_map_the_findings_are_those_of_the_shard():
    kernel = backends.load("triton")
    leaf = jnp.ones((4, 64)).at[2, 5].set(jnp.nan)

    def local(leaf):
        (unscaled,), not_finite = with_kernel(kernel, [leaf], jnp.float32(0.5), ON_CPU)
        return unscaled, not_finite[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh(AxisType.Auto),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,  # interpret mode can't be checked
    )
    unscaled, not_finite = jax.jit(mapped)(leaf)
    np.testing.assert_array_equal(unscaled, leaf * 0.5)
    np.testing.assert_array_equal(not_finite, [0, 0, 1, 0])


def in_checked_shard_map(local):
    """What a function gives for shards of an array, as shapes."""
    mapped = jax.shard_map(
        local,
        mesh=jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=P("x"),
        out_specs=(P("x"), P()),
    )
    return jax.eval_shape(mapped, jnp.ones((8, 64)))


def test_inside_a_checked_shard_map_results_vary_as_the_leaves_do():
    def local(leaf):
        kernel, scale = backends.load("triton"), jnp.float32(0.5)
        (unscaled,), not_finite = with_kernel(kernel, [leaf], scale, Request())
        return unscaled, jax.lax.psum(not_finite, "x")

    unscaled, not_finite = in_checked_shard_map(local)
    assert (unscaled.shape, not_finite.shape) == ((8, 64), ())


def test_inside_a_checked_shard_map_mosaic_gpu_leaves_the_shards_to_xla():
    try:
        kernel = backends.load("mosaic_gpu")
    except ImportError as reason:
        pytest.skip(str(reason))
    taken = [kernel.takes(jnp.ones((8, 64)))]

    def local(leaf):
        taken.append(kernel.takes(leaf))
        return leaf, jax.lax.psum(leaf.sum(), "x")

    in_checked_shard_map(local)
    assert taken == [True, False]


def test_a_mesh_of_several_types_of_axes_is_refused_with_its_types():
    kinds = (AxisType.Auto, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)):
        with pytest.raises(NotImplementedError, match="several types"):
            unscale_and_check([jnp.ones(8)], 1.0, implementation="triton")
        unscale_and_check([jnp.ones(8)], 1.0)


def test_leaves_that_no_kernel_takes_are_done_by_xla_in_the_same_call(monkeypatch):
    kernel = backends.load("triton")
    calls = []

    def run(leaves, inv_scale, request):
        calls.append(len(leaves))
        return reference.run(leaves, inv_scale, request)

    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(backends, "why_not", lambda implementation: [])
    leaves = [jnp.full(leaf.shape, 2, leaf.dtype) for leaf in mixed().values()]
    unscaled, found = unscale_and_check(leaves, 0.5, implementation="triton")
    assert calls == [sum(kernel.takes(leaf) for leaf in leaves)]
    assert 0 < calls[0] < len(leaves)
    assert not found
    for leaf, result in zip(leaves, unscaled, strict=True):
        np.testing.assert_array_equal(
            np.asarray(result, np.complex64), np.ones(leaf.shape, np.complex64)
        )


def test_what_was_measured_names_implementations_by_size():
    for table in backends.measured()["fastest"].values():
        assert table == sorted(table)
        assert {best for _, best in table} <= set(backends.IMPLEMENTATIONS)

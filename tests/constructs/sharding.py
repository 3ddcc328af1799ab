"""Programs on several devices: shard_map, its collectives, meshes and pmap."""

import functools

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

from ._construct import Construct, normal

ROWS = P("i")
BY_ROWS = (ROWS, P())


@functools.cache
def mesh(kind=AxisType.Auto, **axes):
    """A mesh of named axes; by default one axis over all devices."""
    axes = axes or {"i": 8}
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def grid(kind=AxisType.Auto):
    """A mesh of 4x2 devices."""
    return mesh(kind, i=4, j=2)


def rows():
    """Activations with two rows for each device, and a weight."""
    return normal(16, 4), normal(4, 4, seed=1, scale=0.5)


def placed(on, *specs):
    """Those arguments with a sharding each."""
    return tuple(
        jax.device_put(array, NamedSharding(on, spec))
        for array, spec in zip(rows(), specs, strict=True)
    )


def explicit(x_spec, w_spec):
    """Makes them with shardings that are part of their types."""
    return lambda: placed(grid(AxisType.Explicit), x_spec, w_spec)


def mapped(body, inside=BY_ROWS, out=ROWS, on=mesh, **options):
    """A program of one shard_map."""
    return lambda x, w: jax.shard_map(
        body, mesh=on(), in_specs=inside, out_specs=out, **options
    )(x, w)


def compiled(*args, **options):
    """The same under jit: what runs op by op on eight devices is slow."""
    return jax.jit(mapped(*args, **options))


def product_over_rows(x, w):
    """A matmul over the rows of all devices: each adds its own."""
    return jnp.tanh(lax.psum(x.T @ (x @ w), "i") / 8)


def gathered(x, w):
    return lax.all_gather(x, "i")[:, 0] @ w


def ring(devices, x, w):
    """Each device multiplies what its neighbour has, as a pipeline does."""
    ahead = [(device, (device + 1) % devices) for device in range(devices)]
    return jnp.tanh(lax.ppermute(jnp.tanh(x @ w), "i", ahead) @ w)


def transposed_between_devices(x, w):
    y = lax.all_to_all(x, "i", split_axis=1, concat_axis=0, tiled=True)
    return lax.all_to_all(y.T @ y @ w[: y.shape[1]], "i", 1, 0, tiled=True)


def steps_of_a_scan(x, w):
    def step(carry, _):
        carry = jnp.tanh(carry @ w)
        return carry + lax.pmean(carry.mean(0), "i"), carry

    return lax.scan(step, x, None, length=2)[0]


def tensor_parallel(x, w):
    """Columns of one weight and rows of the next lie on the devices of an axis."""

    def body(x, first, second):
        return lax.psum(jnp.tanh(x @ first) @ second, "j")

    specs = (P("i"), P(None, "j"), P("j"))
    return jax.shard_map(body, mesh=grid(), in_specs=specs, out_specs=P("i"))(x, w, w.T)


def in_a_scan(x, w):
    step = mapped(lambda x, w: jnp.tanh(x @ w))
    return lax.scan(lambda c, _: (step(c, w), None), x, None, length=2)[0]


def through_auto_axes(x, w):
    on = grid(AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        fn = jax.sharding.auto_axes(lambda x, w: jnp.tanh(x @ w), out_sharding=P("i"))
        return fn(x, w)


def through_explicit_axes(x, w):
    def inner(x, w):
        return jnp.matmul(x, w, out_sharding=P("i", "j"))

    with jax.sharding.use_abstract_mesh(grid().abstract_mesh):
        fn = jax.sharding.explicit_axes(inner, in_sharding=(P("i"), P(None, "j")))
        return jnp.tanh(fn(x, w))


def contracted_over_devices(x, w):
    on = grid(AxisType.Explicit)
    x = jax.sharding.reshard(x, NamedSharding(on, P(None, "i")))
    w = jax.sharding.reshard(w, NamedSharding(on, P("i")))
    return jnp.einsum("ij,jk->ik", x, w, out_sharding=NamedSharding(on, P("j")))


def constrained(x, w):
    y = lax.with_sharding_constraint(x @ w, NamedSharding(grid(), P("i", "j")))
    return jnp.tanh(y) @ lax.with_sharding_constraint(w, NamedSharding(grid(), P("j")))


def jitted_with_shardings(x, w):
    rows, columns = (NamedSharding(grid(), s) for s in (P("i"), P(None, "j")))
    fn = jax.jit(
        lambda x, w: jnp.tanh(x @ w), in_shardings=(rows, columns), out_shardings=rows
    )
    return fn(x, w)


def pmapped(x, w):
    body = lambda x, w: jnp.tanh(x @ w) - lax.pmean(x @ w, "i")  # noqa: E731
    return jax.pmap(body, "i", in_axes=(0, None))(x.reshape(8, 2, 4), w)


NO_DERIVATIVE = "JAX has no derivative of pmax"

CONSTRUCTS = (
    Construct("shard_map", mapped(lambda x, w: jnp.tanh(x @ w)), rows),
    Construct("shard_map_psum", compiled(product_over_rows, out=P()), rows),
    Construct(
        "shard_map_psum_unchecked",
        compiled(product_over_rows, out=P(), check_vma=False),
        rows,
    ),
    Construct(
        "shard_map_pmean", compiled(lambda x, w: x @ w - lax.pmean(x @ w, "i")), rows
    ),
    Construct(
        "shard_map_pmax",
        compiled(lambda x, w: lax.pmax(x @ w, "i") - lax.pmin(x @ w, "i"), out=P()),
        rows,
        no_gradient=NO_DERIVATIVE,
    ),
    Construct(
        "shard_map_stopped_pmax",
        compiled(lambda x, w: x @ w - lax.pmax(lax.stop_gradient(x @ w), "i")),
        rows,
    ),
    Construct("shard_map_all_gather", compiled(gathered), rows),
    Construct(
        "shard_map_all_gather_tiled",
        compiled(lambda x, w: x @ lax.all_gather(x @ w, "i", tiled=True)[:4]),
        rows,
    ),
    Construct(
        "shard_map_all_gather_unchecked",
        compiled(gathered, out=P(), check_vma=False),
        rows,
    ),
    Construct("shard_map_ppermute", compiled(functools.partial(ring, 8)), rows),
    Construct(
        "shard_map_psum_scatter",
        compiled(
            lambda x, w: lax.psum_scatter(x @ w, "i", tiled=True),
            (P(None, "i"), P("i")),
            on=lambda: mesh(i=2),
        ),
        rows,
    ),
    Construct(
        "shard_map_all_to_all",
        compiled(transposed_between_devices, on=lambda: mesh(i=2)),
        rows,
    ),
    Construct(
        "shard_map_axis_index",
        compiled(lambda x, w: x @ w * (1.0 + lax.axis_index("i")) / 8),
        rows,
    ),
    Construct("shard_map_scan_inside", compiled(steps_of_a_scan), rows),
    Construct("shard_map_in_scan", jax.jit(in_a_scan), rows),
    Construct("shard_map_over_two_axes", jax.jit(tensor_parallel), rows),
    Construct(
        "shard_map_over_both_axes_at_once",
        compiled(
            lambda x, w: lax.psum(jnp.tanh(x @ w), ("i", "j")) / 4,
            (P(("i", "j")), P()),
            P(),
            grid,
        ),
        rows,
    ),
    Construct(
        "shard_map_over_one_of_two_axes",
        # No sum: XLA's CPU backend aborts at one in bfloat16 over some of the axes.
        compiled(functools.partial(ring, 4), on=grid, axis_names={"i"}),
        rows,
    ),
    Construct(
        "shard_map_in_checkpoint",
        jax.checkpoint(compiled(product_over_rows, out=P())),
        rows,
    ),
    Construct("sharding_constraint", constrained, rows),
    Construct("jit_with_shardings", jitted_with_shardings, rows),
    Construct(
        "explicit_axes_by_type",
        lambda x, w: jnp.tanh(x @ w),
        explicit(P("i"), P(None, "j")),
    ),
    Construct("explicit_contraction", contracted_over_devices, explicit(P("i"), P())),
    Construct(
        "explicit_out_sharding",
        lambda x, w: jnp.matmul(
            x, w, out_sharding=NamedSharding(grid(AxisType.Explicit), P("i"))
        ),
        explicit(P("i"), P(None, "j")),
    ),
    Construct("auto_axes", through_auto_axes, explicit(P("i"), P(None, "j"))),
    Construct("explicit_axes", through_explicit_axes, lambda: placed(grid(), P(), P())),
    Construct("pmap", jax.jit(pmapped), rows),
)

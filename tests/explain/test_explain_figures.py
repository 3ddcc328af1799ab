"""Figures of reports, against counts of their own from the rewritten programs."""

import math
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from jaxprs import LOW, factors, is_float
from programs import PROGRAMS

import jamp
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

X = jnp.ones((6, 6))
MATMULS = {"dot_general", "conv_general_dilated"}
# What autocast emits beside the operations of a program: a spread of what is broadcast,
# and marks around the casts that iterations share.
ADDED = {"convert_element_type", "broadcast_in_dim", "stop_gradient"}


def executed(jaxpr, times=1):
    """Equations without inner programs, each with how often it runs."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        combines = eqn.primitive.name.startswith(("scatter", "reduce_"))
        inner = [] if combines else list(jaxprs_in_params(eqn.params))
        if not inner:
            yield eqn, times
        again = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for program in inner:
            yield from executed(program, times * again)


def product_flops(eqn):
    """Of a dot_general (b, m, k) x (b, k, n): the sizes multiply to b^3 (m k n)^2."""
    left, right, result = (v.aval.size for v in (*eqn.invars[:2], *eqn.outvars))
    if eqn.primitive.name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * result * right // eqn.invars[1].aval.shape[features]
    _, (batch, _) = eqn.params["dimension_numbers"]
    batches = math.prod(eqn.invars[0].aval.shape[axis] for axis in batch)
    return 2 * math.isqrt(left * right * result // batches)


def counted_flops(jaxpr):
    """FLOPs of products: all, and those of 16-bit operands."""
    total = low = 0
    for eqn, times in executed(jaxpr):
        if eqn.primitive.name in MATMULS:
            flops = times * product_flops(eqn)
            total += flops
            low += flops * all(v.aval.dtype in LOW for v in factors(eqn))
    return total, low


def counted_bytes(jaxpr):
    """Bytes of results by primitive and dtype."""
    found = Counter()
    for eqn, times in executed(jaxpr):
        if eqn.primitive.name not in ADDED:
            for var in eqn.outvars:
                key = eqn.primitive.name, str(var.aval.dtype)
                found[key] += times * var.aval.size * var.aval.dtype.itemsize
    return found


def counted_casts(jaxpr):
    """Number of conversions between floats, and the bytes they read and write."""
    number = nbytes = 0
    for eqn, times in executed(jaxpr):
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval, eqn.outvars[0].aval
            if is_float(old) and is_float(new) and old.dtype != new.dtype:
                number += times
                nbytes += times * old.size * (old.dtype.itemsize + new.dtype.itemsize)
    return number, nbytes


def reported_bytes(report):
    found = Counter()
    for op in report.to_dict()["operations"]:
        if op["primitive"] not in ADDED:
            for dtype, nbytes in op["result_bytes"].items():
                found[op["primitive"], dtype] += nbytes
    return found


def scanned(x, w):
    def body(carry, noise):
        return jnp.tanh(carry @ w) + noise, jax.nn.softmax(carry)

    return lax.scan(body, x, jnp.ones((7, *x.shape)))


def scan_in_scan(x, w):
    def body(carry, _):
        return scanned(carry, w)[0], None

    return lax.scan(body, x, None, length=3)


def counted_loop(x, w):
    return lax.fori_loop(0, 5, lambda i, carry: carry @ w, x)


def while_loop(x, w):
    return lax.while_loop(lambda y: y.sum() < 9, lambda y: jnp.tanh(y @ w), x)


def branches(x, w):
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w)


def branches_that_meet(x, w):
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.exp(x))


def gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jax.nn.gelu(x @ w)))(w)


def checkpointed(x, w):
    @jax.checkpoint
    def layers(w):
        return jnp.tanh(x @ w) @ w

    return jax.grad(lambda w: jnp.sum(layers(w)))(w)


def checkpointed_without_operations(x, w):
    save = jax.checkpoint_policies.dots_saveable
    twice = jax.checkpoint(lambda h: (h, h), policy=save)
    loss = lambda w: jnp.mean(twice(jax.nn.sigmoid(x @ w))[0] ** 2)  # noqa: E731
    return jax.jvp(loss, (w,), (w,))


def convolved(x, w):
    images, kernel = x.reshape(1, 6, 6, 1), w.reshape(3, 3, 1, 4)
    grouped = jnp.ones((3, 3, 2, 6))
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return lax.conv_general_dilated(
        y, grouped, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2
    )


CONSTRUCTS = {
    fn.__name__: (fn, (X, X))
    for fn in (
        scanned,
        scan_in_scan,
        counted_loop,
        while_loop,
        branches,
        branches_that_meet,
        gradient,
        checkpointed,
        checkpointed_without_operations,
    )
}
CONSTRUCTS["convolved"] = (convolved, (X, jnp.ones((3, 12))))
CASES = {p.name: (p.fn, p.arguments()) for p in PROGRAMS} | CONSTRUCTS
# An operation that rounds its own result has another dtype in the jaxpr, and casts of
# the user's own count as none of autocast's.
ROUNDED, OWN_CASTS = {"keepdims", "scalars", "scatter_add"}, {"cast_by_user"}


def explained(fn, *args, **options):
    """The report, and the program that it is about."""
    rewritten = jax.make_jaxpr(jamp.autocast(fn, **options))(*args)
    return jamp.explain(fn, **options)(*args), rewritten


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_the_rewritten_program(name):
    fn, args = CASES[name]
    report, program = explained(fn, *args, device_type="gpu")
    total, low = counted_flops(program)
    assert report.flops == total
    assert report.low_flop_share == (low / total if total else 0)
    if name not in ROUNDED:
        assert reported_bytes(report) == counted_bytes(program)
    if name not in OWN_CASTS:
        assert (report.casts, report.cast_bytes) == counted_casts(program)


def test_a_ragged_product_and_its_gradients_take_as_many_operations_each():
    sizes = jnp.array([8] * 8)
    x, w, g = jnp.ones((64, 4)), jnp.ones((8, 4, 3)), jnp.ones((64, 3))

    def fn(x, w, g):
        y, gradients = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
        return y, gradients(g)

    report = jamp.explain(fn, device_type="gpu")(x, w, g)
    assert [op.flops for op in report.matmuls] == 3 * [2 * 64 * 4 * 3]


def test_of_symbolic_shapes_the_share_in_16_bits_is_that_of_the_products():
    (rows,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((rows, 6), jnp.float32)

    def fn(x, w):
        h = x @ w
        with jamp.autocast(enabled=False):
            return h @ w

    assert jamp.explain(lambda x, w: x @ w)(x, X).low_flop_share == 1
    report = jamp.explain(fn)(x, X)
    assert report.low_flop_share == 0.5
    assert report.warnings[0].startswith("1 of 2 matmuls and convolutions do not run")
    assert "% of FLOPs" not in str(report)
    assert "not known" in report.to_html()


@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(2, 9), min_size=2, max_size=5),
    rows=st.integers(1, 5),
    steps=st.integers(1, 4),
    device=st.sampled_from(["gpu", "cpu"]),
)
def test_figures_of_networks_of_all_sizes(widths, rows, steps, device):
    weights = [jnp.ones(shape) for shape in zip(widths, [*widths[1:], 3], strict=True)]

    def fn(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    def repeated(weights, batches):
        return lax.map(lambda x: fn(weights, x), batches)

    batches = jnp.ones((steps, rows, widths[0]))
    report, program = explained(repeated, weights, batches, device_type=device)
    assert report.flops == 2 * steps * rows * sum(w.size for w in weights)
    assert report.low_flop_share == 1
    outputs = steps * rows * sum(w.shape[1] for w in weights)
    low = "float16" if device == "gpu" else "bfloat16"
    # The product and its tanh, each in 16 bits.
    assert report.result_bytes[low] == 2 * 2 * outputs
    if device == "gpu" or not MOVES_BFLOAT16_AS_FLOAT32:
        # Elsewhere the loop casts what it stacks, too.
        assert (report.casts, report.cast_bytes) == counted_casts(program)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(nn.Dense(16)(x)))


def test_figures_of_modules_of_linen():
    variables = Network().init(jax.random.key(0), X)
    report, program = explained(Network().apply, variables, X, device_type="gpu")
    assert report.flops == 2 * 6 * (6 * 16 + 16 * 3) == counted_flops(program)[0]
    assert (report.casts, report.cast_bytes) == counted_casts(program)


def test_figures_of_a_module_of_nnx():
    model = nnx.Sequential(
        nnx.Linear(6, 16, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(16, 3, rngs=nnx.Rngs(0)),
    )
    report = jamp.explain(lambda model, x: model(x), device_type="gpu")(model, X)
    assert report.flops == 2 * 6 * (6 * 16 + 16 * 3)
    assert report.low_flop_share == 1


def test_a_result_that_is_rounded_counts_in_the_dtype_handed_on():
    # On CPUs exp computes in float32 and gives what it was given.
    report = jamp.explain(lambda x: jnp.exp(x @ x), device_type="cpu")(X)
    assert report.result_bytes == {"bfloat16": 2 * X.size * 2}
    assert report.low_byte_share == 1


def test_shares_of_bytes_are_of_all_dtypes():
    def fn(x, keep):
        return jnp.where(keep, x @ x, 0.0).astype(jnp.float32), ~keep

    report = jamp.explain(fn, device_type="gpu")(X, X > 0)
    sizes = report.result_bytes
    assert sizes["bool"] == X.size
    assert report.low_byte_share == sizes["float16"] / sum(sizes.values())


def test_a_sharded_program_counts_on_every_device():
    spec = PartitionSpec("i")
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    report = jamp.explain(fn, device_type="gpu")(X)
    assert report.flops == 2 * (2 * 3 * 6 * 3)
    assert report.result_bytes["float16"] == 2 * (2 * 3 * 3)


class Kept(nn.Module):
    """What it keeps for the backward pass can be told by looking."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, use_bias=False)(jnp.tanh(nn.Dense(5, use_bias=False)(x)))


def test_residuals_are_what_the_backward_pass_needs():
    variables = Kept().init(jax.random.key(0), X)
    explain = jamp.explain(Kept().apply, residuals=True, device_type="gpu")
    kept = explain(variables, X).to_dict()["residual_bytes"]
    hidden, weight, derivative = 6 * 5, 5 * 3, 6 * 5
    # As written: tanh's result and its derivative; x and weights are arguments.
    assert kept["as_written"] == {"float32": 4 * (hidden + derivative)}
    # Under autocast the derivative is made of the result in the backward pass; 16 bits
    # of the result, and the casts of x and of the second weight.
    low = 2 * (hidden + X.size + weight)
    assert kept["autocast"] == {"float16": low}


def test_residuals_are_the_arrays_that_vjp_holds():
    # No two of them are one buffer, and none is an argument or a constant.
    def fn(w, x):
        return jnp.sin(jnp.exp(x @ w) * jnp.cos(x @ w))

    _, vjp = jax.vjp(lambda w: fn(w, X), X)
    held = [leaf for leaf in jax.tree.leaves(vjp) if leaf is not X]
    report = jamp.explain(fn, residuals=True, enabled=False)(X, X)
    sizes = [[r.nbytes for r in found] for found in report.residuals]
    assert sizes == 2 * [[leaf.nbytes for leaf in held]]


def test_views_of_a_residual_are_the_same_buffer():
    def fn(w, x):
        y = jnp.exp(x @ w)
        return y @ y.reshape(3, 12).T.reshape(6, 6)

    report = jamp.explain(fn, residuals=True, enabled=False)(X, X)
    (kept,) = report.residuals.as_written
    assert (kept.nbytes, kept.eqn.primitive.name) == (4 * X.size, "exp")


def test_what_comes_of_constants_alone_is_no_residual():
    def fn(w):
        return w * jnp.sin(jnp.arange(6.0))

    report = jamp.explain(fn, residuals=True, enabled=False)(X)
    assert report.residuals == ((), ())


def test_what_is_read_from_a_reference_is_a_residual():
    def fn(w):
        ref = jax.new_ref(jnp.zeros_like(w))
        ref[...] = jnp.sin(w)
        h = ref[...]
        return h * h

    report = jamp.explain(fn, residuals=True, enabled=False)(X)
    # The derivative of sin, and what both factors are.
    assert [r.nbytes for r in report.residuals.as_written] == 2 * [4 * X.size]


def test_residuals_are_those_of_the_first_argument_with_floats():
    def fn(key, w, *, scale):
        return (w @ w) * scale

    explain = jamp.explain(fn, residuals=True, device_type="gpu")
    report = explain(jax.random.key(0), X, scale=jnp.float32(2))
    (cast,) = report.residuals.autocast
    assert (cast.shape, cast.dtype) == (X.shape, np.float16)
    assert report.residuals.as_written == ()


def test_residuals_of_a_module_of_nnx_are_those_of_its_state():
    model = nnx.Linear(6, 3, use_bias=False, rngs=nnx.Rngs(0))
    explain = jamp.explain(lambda model, x: model(x), residuals=True, device_type="gpu")
    report = explain(model, X)
    (cast,) = report.residuals.autocast
    assert (cast.shape, cast.dtype) == (X.shape, np.float16)


def test_nothing_is_kept_where_nothing_is_differentiable():
    report = jamp.explain(lambda n: (n + 1, n > 2), residuals=True)(jnp.arange(3))
    assert report.residuals == ((), ())


def test_residuals_are_counted_on_request_only():
    report = jamp.explain(lambda x: x @ x)(X)
    assert report.residuals is None
    assert report.to_dict()["residual_bytes"] is None

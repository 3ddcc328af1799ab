"""What is known of constants, for each primitive that keeps constants, in all forms."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import each_device
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxprs import equations
from tables import check_each
from test_plan import plan_of

import jamp
from jamp._plan.values import NUMPY_OF
from jamp._primitives import MOVING

SHAPES = ((), (4,), (2, 4))
DTYPES = ("float32", "float16", "int32", "uint8", "bool")
# Those that take no booleans, and those that take no scalars.
NUMERIC = {"add", "clamp", "div", "mul", "neg", "scatter-add", "sub"}
DIMENSIONED = {"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "rev"}
DIMENSIONED |= {"scatter", "scatter-add", "slice", "split", "tile", "transpose"}
DIMENSIONED |= {"unstack"}
# It runs in a kernel only.
PLANNED_ONLY = "with_memory_space_constraint"

AUTO, EXPLICIT = (
    NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(kind,)), PartitionSpec())
    for kind in (AxisType.Auto, AxisType.Explicit)
)


class Make(NamedTuple):
    """Makes operands of a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: str

    def scalar(self, number: float) -> Any:
        """A literal."""
        return np.asarray(number).astype(self.dtype)[()]

    def __call__(self, low: float, high: float) -> Any:
        """A constant: a literal, or two that alternate under a mask."""
        if not self.shape:
            return self.scalar(high)
        mask = lax.broadcasted_iota("int32", self.shape, len(self.shape) - 1) % 2 == 0
        cases = [lax.full(self.shape, self.scalar(number)) for number in (low, high)]
        return lax.select(mask, *cases)

    def data(self) -> Any:
        """An array that the program closes over, of which nothing is known."""
        numbers = np.arange(np.prod(self.shape, dtype=int)).reshape(self.shape)
        return jnp.asarray(numbers % 3).astype(self.dtype)

    def each(self, entry: Any) -> tuple[Any, ...]:
        """An entry for each dimension."""
        return (entry,) * len(self.shape)


@cache
def primitive(name: str) -> Primitive:
    """A primitive that no public function binds outside of a kernel."""
    objects = gc.get_objects()
    return next(o for o in objects if isinstance(o, Primitive) and o.name == name)


def converted(number: Any, dtype: str) -> Any:
    """A cast that is in the program: JAX makes none of a literal itself."""
    return lax.convert_element_type(lax.max(number, number), dtype)


FORMS: dict[str, list[Callable[[Make], Any]]] = {
    "abs": [lambda c: lax.abs(c(-3, -2)), lambda c: lax.abs(c(-3, 2))],
    "add": [
        lambda c: lax.add(c(1, 2), c(3, 5)),
        lambda c: lax.add(c(100, 200), c(56, 100)),
    ],
    "broadcast_in_dim": [lambda c: lax.broadcast(c(1, 2), (3, 1))],
    "broadcast_to": [
        lambda c: primitive("broadcast_to").bind(c(1, 2), shape=(3, *c.shape))
    ],
    "clamp": [
        lambda c: lax.clamp(c.scalar(2), c(1, 9), c.scalar(5)),
        lambda c: lax.clamp(c(1, 4), c(3, 3), c(2, 9)),
        lambda c: lax.clamp(c(1, 6), c(9, 2), c(2, 9)),
    ],
    "concatenate": [
        lambda c: lax.concatenate_p.bind(c(1, 2), dimension=0),
        lambda c: lax.concatenate([c(1, 2), c(3, 4)], 0),
        lambda c: lax.concatenate([c(1, 2), c(3, 4), c(5, 0)], 0),
        lambda c: lax.concatenate([c(1, 2), c.data()], 0),
    ],
    "convert_element_type": [
        lambda c, to=to: converted(c(0.7, 2.7), "int4" if to == c.dtype else to)
        for to in DTYPES
    ],
    "copy": [lambda c: lax.copy_p.bind(c(1, 2))],
    "div": [
        lambda c: lax.div(c(1, 7), c(4, 2)),
        lambda c: lax.div(c(-7, 9), c(-2, -4)),
        lambda c: lax.div(c(1, 2), c(-1, 3)),
    ],
    "dynamic_slice": [
        lambda c: lax.dynamic_slice(c(1, 2), c.each(1), c.each(1)),
        lambda c: lax.dynamic_slice(c(1, 2), c.each(-1), c.each(1)),
        lambda c: lax.dynamic_slice(c.data(), c.each(1), c.each(1)),
        lambda c: lax.dynamic_index_in_dim(c.data(), 1),
    ],
    "max": [lambda c: lax.max(c(1, 0), c(0, 1))],
    "min": [lambda c: lax.min(c(1, 0), c(0, 1))],
    "mul": [
        lambda c: lax.mul(c(2, 3), c(50, 100)),
        lambda c: lax.mul(c(-2, 3), c(9000, -9000)),
        lambda c: lax.mul(c(1, 60000), c(2, 60000)),
    ],
    "name": [lambda c: checkpoint_name(c(1, 2), "x")],
    "neg": [lambda c: lax.neg(c(0, 0)), lambda c: lax.neg(c(1, 2))],
    "pad": [
        lambda c: lax.pad(c(1, 2), c.scalar(0), c.each((1, 2, 1))),
        lambda c: lax.pad(c(1, 2), c.scalar(3), c.each((-1, 0, 0))),
        lambda c: lax.pad(c.data(), c.scalar(3), c.each((1, 0, 0))),
    ],
    "reshape": [lambda c: lax.reshape(c(1, 2), (*c.shape[::-1], 1))],
    "reshard": [lambda c: jax.sharding.reshard(c(1, 2), EXPLICIT)],
    "rev": [lambda c: lax.rev(c(1, 2), (0,))],
    "select_n": [
        lambda c: lax.select_n(np.bool_(True), c(1, 2), c(3, 4)),
        lambda c: lax.select_n(Make(c.shape, "bool")(0, 1), c(1, 2), c(3, 0)),
        lambda c: lax.select_n(np.int32(1), c(7, 7), c(8, 8), c(9, 9)),
        lambda c: lax.select_n(Make(c.shape, "int32")(0, 2), c(7, 7), c(8, 8), c(9, 9)),
    ],
    "sharding_constraint": [lambda c: lax.with_sharding_constraint(c(1, 2), AUTO)],
    "slice": [lambda c: lax.slice(c(1, 2), c.each(1), c.each(2))],
    "split": [lambda c: lax.split(c(1, 2), (1, 3), -1)],
    "squeeze": [lambda c: lax.squeeze(lax.broadcast(c(1, 2), (1,)), (0,))],
    "stack": [
        lambda c: lax.stack([c(1, 2), c(3, 4), c(5, 0)], -1),
        lambda c: lax.stack([c(1, 2), c.data()]),
    ],
    "stop_gradient": [lambda c: primitive("stop_gradient").bind(c(1, 2))],
    "sub": [lambda c: lax.sub(c(5, 2), c(1, 1)), lambda c: lax.sub(c(1, 2), c(5, 3))],
    "tile": [lambda c: lax.tile(c(1, 2), c.each(2))],
    "transpose": [
        lambda c: lax.transpose(c(1, 2)[None], (*range(1, len(c.shape) + 1), 0))
    ],
    "unstack": [lambda c: lax.unstack(c(1, 2), -1)],
    PLANNED_ONLY: [lambda c: pltpu.with_memory_space_constraint(c(1, 2), pltpu.HBM)],
}

# Primitives that take indices too and keep none.
INDEXED: dict[str, list[Callable[[Make], Any]]] = {
    "dynamic_update_slice": [
        lambda c: lax.dynamic_update_slice(c(1, 2), ones(c), c.each(1)),
        lambda c: lax.dynamic_update_slice(c.data(), ones(c), c.each(1)),
    ],
    "gather": [lambda c: jnp.take(c(1, 2), np.array([1, 0]), 0)],
    "scatter": [
        lambda c: jnp.asarray(c(1, 2)).at[np.array([1, 0])].set(c.scalar(3)),
        lambda c: c.data().at[1].set(c.scalar(3)),
    ],
    "scatter-add": [lambda c: c.data().at[np.array([1, 0])].add(c.scalar(3))],
}


def ones(c: Make) -> Any:
    return lax.full(c.each(1), c.scalar(1))


class Row(NamedTuple):
    """One form of a primitive for one shape and dtype."""

    name: str
    number: int
    make: Make

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.make.dtype}{self.make.shape}"

    def __call__(self) -> Any:
        return (FORMS | INDEXED)[self.name][self.number](self.make)


def rows(name: str) -> list[Row]:
    """A primitive's forms in all the shapes and dtypes that it takes."""
    shapes = SHAPES[1:] if name in DIMENSIONED else SHAPES
    dtypes = DTYPES[:3] if name == "abs" else DTYPES
    dtypes = DTYPES[:4] if name in NUMERIC else dtypes
    makes = [Make(shape, dtype) for shape in shapes for dtype in dtypes]
    forms = range(len((FORMS | INDEXED)[name]))
    return [Row(name, form, make) for form in forms for make in makes]


def known_of(row: Row) -> list[Any]:
    """What is known of a row's results."""
    program = jax.make_jaxpr(row)()
    assert row.name in {eqn.primitive.name for eqn in equations(program)}
    return [value.traits.constants for value in plan_of(program, []).results]


def values(table: list[Row]) -> tuple[Any, Any]:
    """The results of rows under autocast and without, from one program."""

    def run() -> list[Any]:
        return [row() if row.name != PLANNED_ONLY else row.make(1, 2) for row in table]

    both = jax.jit(lambda: (jamp.autocast(run)(), run()))()
    under, without = ([jax.tree.leaves(row) for row in each] for each in both)
    return under, without


def compare(found: tuple[Row, list[Any], list[Any], list[Any]]) -> None:
    _, known, values, expected = found
    for numbers, value, right in zip(known, values, expected, strict=True):
        np.testing.assert_array_equal(value, right, strict=True)
        if numbers is not None:
            assert set(np.asarray(right, np.float64).ravel().tolist()) <= numbers


@pytest.mark.numbers
@pytest.mark.parametrize("name", FORMS | INDEXED)
def test_constants_hold_the_numbers_that_jax_computes(name):
    table = rows(name)
    with jax.set_mesh(EXPLICIT.mesh) if name == "reshard" else nullcontext():
        known = [known_of(row) for row in table]
        found, expected = values(table)
    check_each(
        zip(table, known, found, expected, strict=True), compare, lambda r: str(r[0])
    )
    assert any(None not in numbers for numbers in known) == (name in FORMS)


def test_every_primitive_that_keeps_constants_has_a_row():
    assert FORMS.keys() == NUMPY_OF.keys()
    # A barrier gives several values at once; the others write into an array.
    others = {"optimization_barrier", "dynamic_update_slice", "scatter"}
    assert MOVING - others <= FORMS.keys()


@pytest.mark.parametrize("join", [jnp.hstack, jnp.stack, jnp.concatenate])
def test_any_number_of_constants_may_be_joined(join):
    table = jamp.autocast(lambda x: x * join([jnp.ones(1) * n for n in range(80)]))
    x = jnp.ones(80) if join is not jnp.stack else jnp.ones((80, 1))
    assert table(x).ravel().tolist() == list(range(80))


@pytest.mark.parametrize(
    "constant",
    [
        lambda: lax.div(np.int32(7), np.int32(2)).astype("float32"),
        lambda: lax.add(np.uint8(200), np.uint8(100)).astype("float32"),
        lambda: converted(np.float32(2.7), "int32").astype("float32"),
        lambda: converted(np.float32(1e-9), "float16").astype("float32"),
    ],
    ids=["integer division", "wrapped", "truncated", "underflowed"],
)
def test_a_constant_is_the_number_that_the_program_computes(constant):
    scaled = jamp.autocast(lambda x: (x @ x) * constant())(jnp.eye(2))
    np.testing.assert_array_equal(scaled, jnp.eye(2) * constant())


TINY = {
    "added to a mask": lambda m: m + 1e-8,
    "subtracted from a mask": lambda m: 1e-8 - m,
    "chosen by a mask": lambda m: jnp.where(m, 1.0, 1e-8),
    "scaled mask": lambda m: m * 1e-8,
    "quotient": lambda m: (m + 1.0) / 1e8,
    "negative": lambda m: -(m + 1e-8),
    "beside NaN": lambda m: jnp.where(m, jnp.nan, 1e-8),
    "padded": lambda m: jnp.pad(jnp.where(m, 1.0, 2.0), 1, constant_values=1e-8)[1:-1],
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tiny_number_in_a_range_is_kept_from_float16(name, dtype):
    mask = np.array([True, False, True])

    def fn(x, w, mask):
        return x @ w * TINY[name](mask)

    found = jamp.autocast(fn, device_type="gpu", dtype=dtype)(
        jnp.ones((3, 3)), jnp.eye(3), mask
    )
    expected = fn(jnp.ones((3, 3)), jnp.eye(3), mask)
    assert found.dtype == ("float32" if dtype == "float16" else dtype)
    np.testing.assert_allclose(np.float32(found), expected, rtol=2**-8)


HARMLESS = {
    "inverted": lambda m: 1.0 - m,
    "scaled": lambda m: m * -1e4,
    "additive": lambda m: jnp.where(m, 0.0, -jnp.inf),
    "of NaN": lambda m: jnp.where(m, 0.0, jnp.nan),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_mask_without_tiny_numbers_stays_in_16_bits(name):
    def fn(x, w, mask):
        return x @ w + HARMLESS[name](mask)

    ones, mask = jnp.ones((3, 3)), np.array([True, False, True])
    assert jamp.autocast(fn, device_type="gpu")(ones, ones, mask).dtype == "float16"


BY_A_CONSTANT = {
    "added": lambda h: h + 0.3,
    "subtracted from it": lambda h: 0.3 - h,
    "scaled": lambda h: 0.1 * h,
    "divided": lambda h: h / 0.9,
    "divided by a large count": lambda h: h / 5001,
    "kept or dropped": lambda h: h * ((jnp.abs(h) < 1) / 0.9),
    "kept or dropped by where": lambda h: h * jnp.where(jnp.abs(h) < 1, 1 / 0.9, 0.0),
}


@pytest.mark.parametrize("name", BY_A_CONSTANT)
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_a_constant_that_16_bits_do_not_hold_is_rounded_with_the_result(name, low):
    def fn(x):
        return BY_A_CONSTANT[name](x @ jnp.eye(64))

    x = jax.random.normal(jax.random.key(0), (64, 64)).astype(low)
    x = x.astype("float32")
    found, pullback = jax.vjp(jamp.autocast(fn, device_type="gpu", dtype=low), x)
    expected, pullback_in_float32 = jax.vjp(BY_A_CONSTANT[name], x)
    assert found.dtype == low
    np.testing.assert_array_equal(found, expected.astype(low))
    (gradient,), (in_float32,) = pullback(x.astype(low)), pullback_in_float32(x)
    np.testing.assert_array_equal(gradient, in_float32.astype(low))


CHOSEN = {
    "a factor": lambda h, flag: h * jnp.where(flag, 2.0, jnp.nan),
    "a limit": lambda h, flag: jnp.maximum(h, jnp.where(flag, 2.0, jnp.nan)),
    "an offset": lambda h, flag: h + flag.astype(jnp.float32) * jnp.inf,
    "a zero of either sign": lambda h, flag: 1 / (h * jnp.where(flag, 0.0, -0.0)),
}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
@each_device
def test_a_scalar_that_the_program_chooses_is_no_constant(device, chosen, flag):
    def fn(x, flag):
        return chosen(x @ x, flag)

    arguments = jnp.ones((3, 3)), jnp.asarray(flag)
    found = jamp.autocast(fn, device_type=device)(*arguments)
    np.testing.assert_array_equal(np.float32(found), fn(*arguments))


CHAINS = {
    "small, of the user's": lambda x: x * jnp.float16(1e-4) * jnp.float16(1e-4),
    "small powers of two": lambda x: x * 2.0**-14 * 2.0**-14,
    "large": lambda x: (x / 2**18) * 1024.0 * 256.0,
    "a small one first": lambda x: x * 2.0**-18 * 0.5,
    "in a gradient": jax.grad(lambda x: jnp.sum(x * 2.0**-12 * 2.0**-14) * 2.0**10),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_several_constants_scale_is_in_range(name):
    """XLA multiplies them with each other first, in the dtype of the program."""
    x, eye = jnp.full((4, 4), 40_000.0), jnp.eye(4)
    cast = jamp.autocast(lambda x: CHAINS[name](x @ eye), device_type="gpu")
    expected = CHAINS[name](x)
    for run in (jax.jit(cast), cast):
        np.testing.assert_allclose(run(x), expected, rtol=2**-9)

"""jamp returns the dtypes that torch returns, and values as accurate as torch's.

Dtypes are compared with what torch 2.13 was measured to return for each op, on both of
its devices and for float32 and 16-bit inputs. Values are compared with the same case in
float64: the drawn arguments are exact in every dtype, so all that differs is rounding.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jaxprs import equations
from op_cases import GROUPS, draw
from tables import check_each
from torch_parity import (
    BY_OP,
    DEVICES,
    KINDS,
    OPS,
    arguments,
    computed,
    differences,
    is_composed,
    measurements,
    read_differences,
    reasons,
    references,
    shares,
    traced,
)

each_group = pytest.mark.parametrize("group", GROUPS)


def measured_rows(counted=True):
    return [row for row in measurements() if row.counted == counted]


def in_group(rows, group):
    return [row for row in rows if row.case in GROUPS[group]]


# Dtypes.


def assert_as_known(row, returned):
    """torch's dtypes, unless the table says that they differ: then others."""
    if row.key in reasons():
        assert returned != row.torch, "it agrees: remove it from op_differences.toml"
    else:
        assert returned == row.torch


@each_group
def test_the_dtypes_are_those_of_torch(group):
    check_each(
        in_group(measured_rows(), group),
        lambda row: assert_as_known(row, row.jamp()),
        lambda row: row.name,
    )


def test_complex64_stands_in_for_the_complex32_that_jax_lacks():
    def check(row):
        expected = [d.replace("complex32", "complex64") for d in row.torch]
        assert list(row.jamp()) == expected

    check_each(measured_rows(counted=False), check, lambda row: row.name)


def test_almost_all_measurements_agree(record_property):
    # Each is held by the test above, so that listed differences tell how many agree.
    of_all, of_functions = shares()
    record_property("ops that JAX has a function for", str(of_functions))
    record_property("all ops", str(of_all))
    assert of_functions.agree / of_functions.total >= 0.97, of_functions
    assert of_all.agree / of_all.total >= 0.94, of_all


def test_each_difference_is_of_something_measured_and_is_listed_once():
    listed = [key for known in differences() for key in known.keys]
    assert len(listed) == len(set(listed))
    assert set(listed) <= {row.key for row in measured_rows()}


def test_each_difference_has_a_reason():
    assert all(known.reason.endswith(".") and known.keys for known in differences())


def test_an_op_is_composed_where_its_note_says_so():
    def check(op):
        assert OPS[op]["composed"] == is_composed(OPS[op]["note"])

    check_each(OPS, check)


# Values.

# The error allowed, relative to the largest entry of the reference: a multiple of the
# spacing at 1 of the narrowest dtype in which anything was computed, times the square
# root of the number of terms that are summed.
TOLERANCE = {
    # XLA's exp, log, tanh ... are accurate to a few units in the last place.
    "float32": 4 * 2.0**-23,
    # One rounding is half a spacing. An op may round a few times on its way: a product,
    # the sum with its bias, an activation, a mean.
    "float16": 2 * 2.0**-10,
    "bfloat16": 2 * 2.0**-7,
}


class Allowance(NamedTuple):
    """More than the table allows, for a reason that lies in the op.

    Attributes:
      reason: the reason.
      factor: by how much the tolerance grows.
      kinds: the kinds of arguments that it holds for.
      rounded: whether the program as traced holds constants of the arguments' dtype.
    """

    reason: str
    factor: float = 1
    kinds: tuple[str, ...] = KINDS
    rounded: bool = False


_VECTORS = Allowance("vectors turn by the error over the gap between two values", 4)
_PIXELS = Allowance(
    "coordinates are scaled to pixels before the call, in 16 bits", 4, ("low",)
)
_SERIES = Allowance("XLA's series in float32 is off by as much", 4, ("float32",))
ALLOWANCES = {
    "grid_sample": _PIXELS,
    "grid_sampler": _PIXELS,
    "grid_sampler_2d": _PIXELS,
    "grid_sampler_3d": _PIXELS,
    "linalg_eig": Allowance(
        "the matrix is asymmetric: its vectors are ill-defined", 32
    ),
    "linalg_eigh": _VECTORS,
    "linalg_eigvals": Allowance("the matrix is asymmetric, its values are iterated", 4),
    "linalg_svd": _VECTORS,
    "log10": Allowance(
        "it divides by log(10), which JAX traces in the dtype of the arguments",
        kinds=("low",),
        rounded=True,
    ),
    "lgamma": _SERIES,
    "special_gammainc": _SERIES,
    "special_gammaincc": _SERIES,
    "svd": _VECTORS,
}

# What cannot run on a CPU, with jamp or without.
NOT_ON_CPU = {
    ("scaled_dot_product_attention", "gpu", "low"): (
        "jax.nn.dot_product_attention asks for an algorithm for float16 that CPUs lack"
    )
}


def narrowest(program):
    """The narrowest floating dtype in which a program computes anything."""
    dtypes = [
        var.aval.dtype
        for eqn in equations(program.jaxpr)
        for var in eqn.outvars
        if jnp.issubdtype(getattr(var.aval, "dtype", np.int32), np.floating)
    ]
    return min([*dtypes, np.dtype(np.float32)], key=lambda dtype: dtype.itemsize)


def summed(program):
    """The largest number of terms that one equation of a program sums."""
    terms = [1]
    for eqn in equations(program.jaxpr):
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.invars]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            terms.append(math.prod(shapes[0][axis] for axis in contracted))
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.params["dimension_numbers"].rhs_spec
            terms.append(math.prod(shapes[1][axis] for axis in kernel[1:]))
        elif eqn.primitive.name in ("reduce_sum", "cumsum"):
            terms.append(math.prod(shapes[0]))
    return max(terms)


def assert_within(actual, expected, tolerance):
    """Each output is within `tolerance` of the reference's largest entry."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        if not np.issubdtype(y.dtype, np.inexact):
            np.testing.assert_array_equal(x, y)
        elif y.size:
            scale = max(np.abs(y).max(), 1e-6)
            assert np.abs(x.astype(y.dtype) - y).max() <= tolerance * scale


def tolerance_of(op, kind, low, program):
    """The error allowed for a program that computes an op."""
    dtype, factor = narrowest(program), 1
    allowance = ALLOWANCES.get(op)
    if allowance is not None and kind in allowance.kinds:
        dtype = np.dtype(low) if allowance.rounded else dtype
        factor = allowance.factor
    return factor * TOLERANCE[dtype.name] * math.sqrt(summed(program))


@pytest.mark.numbers
@pytest.mark.parametrize("kind", KINDS)
@each_group
def test_values_are_as_accurate_as_their_dtypes(group, kind):
    rows = [
        (case.op, device)
        for case in GROUPS[group]
        for device in DEVICES
        if case.values and (case.op, device, kind) not in NOT_ON_CPU
    ]
    programs = {row: traced(*row, kind) for row in rows}
    # An op may be the same program on both devices: it is compiled once.
    keys = {row: (row[0], str(program)) for row, program in programs.items()}
    results = computed(
        {keys[row]: jaxpr_as_fun(programs[row]) for row in rows},
        {keys[row]: arguments(*row, kind) for row in rows},
    )

    def check(row):
        op, device = row
        tolerance = tolerance_of(op, kind, DEVICES[device][1], programs[row])
        assert_within(results[keys[row]], references(group)[op], tolerance)

    check_each(rows, check)


@pytest.mark.parametrize("op, device, kind", NOT_ON_CPU)
def test_what_cannot_run_on_a_cpu_cannot_without_jamp_either(op, device, kind):
    with pytest.raises(ValueError, match="not supported by dot_general on CPU"):
        jax.jit(BY_OP[op].fn)(*arguments(op, device, kind))


# What follows feeds each comparing function a wrong value.


def test_a_stale_difference_and_an_unlisted_one_are_found():
    known = next(row for row in measured_rows() if row.key in reasons())
    other = next(row for row in measured_rows() if row.key not in reasons())
    assert_as_known(known, ("something else",))
    assert_as_known(other, other.torch)
    with pytest.raises(AssertionError):
        assert_as_known(known, known.torch)
    with pytest.raises(AssertionError):
        assert_as_known(other, ("something else",))


def test_differences_are_read_by_device_and_kind():
    text = '[[differences]]\nreason = "why\\n so."\ngpu.low = ["a", "b"]\n'
    (known,) = read_differences(text)
    assert known.reason == "why so."
    assert known.keys == (("a", "gpu", "low"), ("b", "gpu", "low"))


@pytest.mark.parametrize(
    "wrong", [[1.0, 2.1], [1.0, np.nan], [1.0]], ids=["off", "nan", "short"]
)
def test_comparing_values_rejects_a_wrong_one(wrong):
    expected = [np.array([1.0, 2.0])]
    assert_within([np.array([1.0, 2.001], np.float32)], expected, 1e-2)
    with pytest.raises(AssertionError):
        assert_within([np.array(wrong, np.float32)], expected, 1e-2)


def test_a_rounding_too_many_is_found():
    case = BY_OP["mm"]
    expected = references("matmul")["mm"]
    rounded = [np.asarray(x, jnp.bfloat16) for x in expected]
    program = jax.make_jaxpr(case.fn)(*draw(case, jnp.float32))
    tolerance = tolerance_of("mm", "float32", jnp.bfloat16, program)
    with pytest.raises(AssertionError):
        assert_within(rounded, expected, tolerance)


@pytest.mark.parametrize("op", ALLOWANCES)
def test_an_allowance_is_for_a_case_whose_values_are_compared(op):
    assert BY_OP[op].values
    assert ALLOWANCES[op].factor > 1 or ALLOWANCES[op].rounded

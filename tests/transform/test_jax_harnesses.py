"""JAX's own cases of its primitives run under autocast, near what plain JAX gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax_harnesses import FLOAT32, HARNESSES, SAMPLE, arguments, is_refused
from jaxprs import dtypes, is_float

import jamp

# Roundings of the coarser dtype of the two results.
ROUNDINGS = 16

# Their results are sums of terms that may be much larger, so that an error is relative
# to the largest result instead of to each.
SUMS = ("conv_general_dilated", "dot_general")

each_group = pytest.mark.parametrize("group", HARNESSES)


def product(array):
    """The array itself, as the result of a matmul if it is in float32."""
    if array.dtype != FLOAT32:
        return array
    pairs = jnp.stack([array, jnp.zeros_like(array)], -1)
    return pairs @ jnp.ones(2, FLOAT32)


def rounded(array, low):
    """The array itself, rounded to 16 bits if it is in float32."""
    return array.astype(low).astype(FLOAT32) if array.dtype == FLOAT32 else array


def ways(harness, device):
    """The ways to run a case, each with what plain JAX is to compute instead."""

    def after_products(*args):
        return harness.dyn_fun(*map(product, args))

    def of_rounded(*args):
        return harness.dyn_fun(*(rounded(array, LOW[device]) for array in args))

    yield "alone", harness.dyn_fun, harness.dyn_fun
    if any(array.dtype == FLOAT32 for array in arguments(harness)):
        yield "after products", after_products, of_rounded


def under_autocast(harness, devices):
    """A program of a case in each way, and of what each is to be near."""

    def run(*args):
        return {
            f"{device}, {way}": (
                jamp.autocast(fn, device_type=device)(*args),
                near(*args),
            )
            for device in devices
            for way, fn, near in ways(harness, device)
        }

    return run


def compiled(fn):
    # XLA may leave out roundings to 16 bits unless it is told not to.
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})


def alone(harness, run):
    """What computes a case and tells its dtypes beforehand."""
    given = arguments(harness)
    return lambda: (run(*given), jax.eval_shape(run, *given))


def together(harnesses, devices):
    """What computes each case, as a part of one program: it is compiled sooner."""
    runs = [under_autocast(harness, devices) for harness in harnesses]
    given = [arguments(harness) for harness in harnesses]
    whole = compiled(
        lambda given: [run(*own) for run, own in zip(runs, given, strict=True)]
    )
    try:
        results = list(zip(whole(given), jax.eval_shape(whole, given), strict=True))
    except Exception:  # noqa: BLE001 - the cases by themselves tell whose it is
        return list(map(alone, harnesses, map(compiled, runs)))
    return [lambda result=result: result for result in results]


def fault(actual, expected, sums=False):
    """What is wrong with a leaf of a result; None if nothing is."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, not {expected.shape}"
    if not is_float(expected) or not is_float(actual):
        if actual.dtype != expected.dtype:
            return f"dtype {actual.dtype}, not {expected.dtype}"
        if not jnp.issubdtype(actual.dtype, jnp.complexfloating):
            wrong = np.sum(actual != expected)
            return f"{wrong} of {actual.size} elements differ" if wrong else None
    eps = max(float(jnp.finfo(x.dtype).eps) for x in (actual, expected))
    if actual.dtype.itemsize > expected.dtype.itemsize:
        with np.errstate(over="ignore"):  # infinite where plain JAX overflows
            actual = actual.astype(expected.dtype)
    actual, expected = (x.astype(np.complex128) for x in (actual, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return "another infinity or NaN"
    actual, expected = actual[finite], expected[finite]
    if not np.all(np.isfinite(actual)):
        return "not finite"
    size = np.abs(expected)
    size = np.maximum(1, np.max(size, initial=0) if sums else size)
    off = np.max(np.abs(actual - expected) / size, initial=0) / eps
    return f"off by {off:.1f} roundings" if off > ROUNDINGS else None


def faults(harness, compute):
    """What is wrong with a case, in words, if `compute` computes it in each way."""
    sums = harness.group_name in SUMS
    try:
        computed, promised = compute()
    except Exception as error:  # noqa: BLE001 - reported with the others
        yield f"{harness.fullname}: {error!r}"
        return
    if dtypes(computed) != dtypes(promised):
        yield f"{harness.fullname}: other dtypes when traced"
    for way, (actual, expected) in computed.items():
        where = f"{harness.fullname}, {way}"
        if jax.tree.structure(actual) != jax.tree.structure(expected):
            yield f"{where}: another tree"
            continue
        pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        for what in (fault(*pair, sums) for pair in pairs):
            if what:
                yield f"{where}: {what}"


# To compile these, which run as traced, takes as long as to compile fifty others.
LONG = {"igamma", "igammac", "regularized_incomplete_beta"}


@pytest.mark.once
@pytest.mark.parametrize("group", [name for name in HARNESSES if name not in LONG])
def test_a_case_of_each_dtype_is_near_plain_jax(group):
    # It is compiling that takes the time: both policies are one program.
    cases = zip(SAMPLE[group], together(SAMPLE[group], LOW), strict=True)
    found = [what for case in cases for what in faults(*case)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@each_device
@each_group
def test_every_case_is_near_plain_jax(group, device):
    accepted = [harness for harness in HARNESSES[group] if not is_refused(harness)]
    programs = [(harness, under_autocast(harness, [device])) for harness in accepted]
    found = [
        what
        for harness, run in programs
        for way in (run, compiled(run))
        for what in faults(harness, alone(harness, way))
    ]
    assert not found, "\n".join(found)
    jax.clear_caches()  # thousands of programs


@pytest.mark.slow
def test_plain_jax_refuses_few_cases():
    harnesses = [harness for group in HARNESSES.values() for harness in group]
    refused = [harness.fullname for harness in filter(is_refused, harnesses)]
    assert len(refused) < 0.02 * len(harnesses), refused


@each_device
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)], ids=str)
def test_a_product_is_the_array_in_16_bits(shape, device):
    array = np.full(shape, 1.5, np.float32)
    result = jamp.autocast(product, device_type=device)(array)
    assert result.dtype == LOW[device]
    np.testing.assert_array_equal(result.astype(np.float32), array)


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        (np.float32([1, 2, np.inf]), None),
        (np.float16([1, 2, np.inf]), None),
        (np.float16([1, 2.001, np.inf]), None),
        (np.float32([1, 2.001, np.inf]), "off by"),
        (np.float16([1, 2.1, np.inf]), "off by"),
        (np.float16([1, np.nan, np.inf]), "not finite"),
        (np.float32([1, 2, -np.inf]), "another infinity"),
        (np.float32([[1, 2, np.inf]]), "shape"),
        (np.int32([1, 2, 3]), "dtype"),
    ],
)
def test_a_result_that_is_off_is_found(actual, said):
    found = fault(actual, np.float32([1, 2, np.inf]))
    assert (found is None) if said is None else said in found


def test_a_wrong_integer_is_found():
    assert fault(np.int32([1, 2]), np.int32([1, 2])) is None
    assert "1 of 2" in fault(np.int32([1, 2]), np.int32([1, 3]))

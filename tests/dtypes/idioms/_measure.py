"""How far an idiom under autocast is from float32 on the same 16-bit numbers.

The activation comes out of a product that rounds nothing more: float32 and 16 bits
begin with the same numbers. An error is counted in spacings of the 16-bit dtype at the
largest number of a result: its `eps` times that number, or its smallest number.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp

from ._idiom import MAGNITUDES, Idiom
from ._programs import contracts, differentiated, flat, with_16_bit_products

LOW: dict[str, Any] = {"gpu": jnp.float16, "cpu": jnp.bfloat16}

# Spacings for each step. One whose result has 16 bits in torch too is a rounding, half
# a spacing. A derivative goes through the steps once forward and once back, with about
# two products for each.
PASSES = ("forward", "gradient")
BOUNDS = {"forward": 0.5, "gradient": 2.0}

# Products that the policy lowers round operands and results. What that does to a result
# is measured on the reference; rounded elsewhere, they are as far off in another way.
PRODUCTS = 4.0

# What float32 itself has lost is not asked of autocast: more of the bound than this.
FLOAT32 = 0.25

# The largest gradient of the activation, where a loss scaler keeps those of float16.
LARGEST_GRADIENT = 2.0**-4
LARGEST_COTANGENT = 2.0**14
SMALLEST_FACTOR = 2.0**-24  # no scaler goes there


class Case(NamedTuple):
    """One comparison: of the results, or of the gradients.

    Attributes:
      error: in spacings; infinite where a number is not finite that should be.
      allowed: how large it may be.
    """

    idiom: str
    policy: str
    std: float
    mean: float
    of: str
    error: float
    allowed: float

    @property
    def safe(self) -> bool:
        """Whether the error is within what is allowed."""
        return self.error <= self.allowed

    @property
    def key(self) -> str:
        """What the list of unsafe idioms knows it by."""
        return f"{self.policy} {self.idiom} {self.of}"

    def __str__(self) -> str:
        return (
            f"{self.idiom:42} {self.policy} {self.of:8} std {self.std:<4} "
            f"mean {self.mean:<2} {self.error:9.3g} spacings of {self.allowed:.3g}"
        )


class _Numbers(NamedTuple):
    """What an idiom returned, in float64."""

    forward: list[np.ndarray]
    gradient: list[np.ndarray]


def _numbers(returned: Any) -> _Numbers:
    arrays = [
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(part)]
        for part in returned
    ]
    return _Numbers(*arrays)


def _float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


class _Reference:
    """An idiom without autocast."""

    def __init__(self, idiom: Idiom) -> None:
        self.parameters = idiom.parameters
        self.idiom = idiom
        fn = flat(idiom.fn)
        self.jaxpr = jax.make_jaxpr(fn)(idiom.activation(1, 0), *idiom.parameters)
        assert {aval.dtype for aval in self.jaxpr.out_avals} == {np.dtype(np.float32)}
        self.run = differentiated(fn, idiom)
        self.with_products: dict[Any, Any] = {}
        rng = np.random.default_rng(0)
        self.cotangents = [  # exact in either dtype
            rng.standard_normal(aval.shape).astype(jnp.bfloat16).astype(np.float32)
            for aval in self.jaxpr.out_avals
        ]

    def float32(self, x: np.ndarray) -> _Numbers:
        return _numbers(self.run(x, self.parameters, self.cotangents))

    def float64(self, x: np.ndarray) -> _Numbers:
        with jax.enable_x64(True):
            wide = [_float64(p) for p in self.parameters]
            return _numbers(self.run(_float64(x), wide, self.cotangents))

    def products(self, x: np.ndarray, low: Any) -> _Numbers:
        """What it is in float32 with 16-bit products."""
        if not contracts(self.jaxpr):
            return self.float32(x)
        if low not in self.with_products:
            fn = with_16_bit_products(self.jaxpr, low)
            self.with_products[low] = differentiated(fn, self.idiom)
        return _numbers(self.with_products[low](x, self.parameters, self.cotangents))

    def magnitudes(self, x: np.ndarray) -> list[float]:
        """The largest numbers of the gradients.

        A sum of few terms may be small by chance, so cotangents of other signs count.
        """
        rng, found = np.random.default_rng(1), []
        for _ in range(4):
            signed = [c * rng.choice([-1.0, 1.0], c.shape) for c in self.cotangents]
            _, gradients = self.run(
                x, self.parameters, [c.astype(np.float32) for c in signed]
            )
            found.append([_largest(np.asarray(leaf)) for leaf in gradients])
        return [max(some) for some in zip(*found, strict=True)]


def under_autocast(idiom: Idiom, policy: str, *, cast: bool = False) -> Any:
    """The idiom under autocast, differentiated.

    Args:
      idiom: what is run.
      policy: the policy.
      cast: whether its user casts to float32 what comes out of the first product.
    """
    eye = np.eye(idiom.shape[-1], dtype=np.float32)

    def lowered(x: Any, eye: Any, *parameters: Any) -> Any:
        h = x @ eye
        h = h.astype(jnp.float32) if cast else h
        return flat(idiom.fn)(h, *parameters)

    wrapped = jamp.autocast(lowered, device_type=policy)
    return differentiated(
        lambda x, *parameters: wrapped(x, jnp.asarray(eye), *parameters), idiom
    )


def _factor(gradient: np.ndarray, cotangents: list[np.ndarray], low: Any) -> float:
    """The power of two by which a loss scaler would have multiplied the cotangents."""
    largest = _largest(gradient)
    if low == jnp.bfloat16 or not largest or not math.isfinite(largest):
        return 1.0
    most = LARGEST_COTANGENT / max(map(_largest, cotangents))
    return float(2.0 ** math.floor(math.log2(min(LARGEST_GRADIENT / largest, most))))


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    error = _largest(got - expected)
    return error if math.isfinite(error) else math.inf


def _compared(
    of: str,
    idiom: _Reference,
    x: np.ndarray,
    low: Any,
    got: _Numbers,
    want: _Numbers,
    factor: float,
) -> tuple[float, float] | None:
    """The error and what is allowed, of the worst array.

    None where float32 is lost, or where a 16-bit product overflows.
    """
    part = PASSES.index(of)
    info, bound = jnp.finfo(low), idiom.idiom.steps * BOUNDS[of]
    eps, least = float(info.eps), float(info.smallest_subnormal) / factor
    errors = [_error(*pair) for pair in zip(got[part], want[part], strict=True)]
    magnitudes = [_largest(array) for array in want[part]]

    def spacings(values: list[float]) -> list[float]:
        return [
            value / max(eps * magnitude, least)
            for value, magnitude in zip(values, magnitudes, strict=True)
        ]

    if max(spacings(errors)) <= bound:
        return max(spacings(errors)), bound
    # What takes more compiling is asked for only where it matters.
    if of == "gradient":
        magnitudes = [
            max(pair) for pair in zip(magnitudes, idiom.magnitudes(x), strict=True)
        ]
    exact, rounded = idiom.float64(x)[part], idiom.products(x, low)[part]
    lost = [_error(*pair) for pair in zip(want[part], exact, strict=True)]
    products = [_error(*pair) for pair in zip(want[part], rounded, strict=True)]
    if max(spacings(lost)) > FLOAT32 * bound or math.inf in products:
        return None
    pairs = zip(spacings(errors), spacings(products), strict=True)
    found = [(error, bound + PRODUCTS * product) for error, product in pairs]
    return max(found, key=lambda pair: pair[0] / pair[1])


def cases(
    idiom: Idiom, policies: tuple[str, ...] = tuple(LOW), runs: Any = under_autocast
) -> Iterator[Case]:
    """Compares an idiom under autocast with float32, at every magnitude.

    Args:
      idiom: what is run.
      policies: the policies to run it under.
      runs: takes the idiom and a policy, and returns what runs it under autocast.
    """
    reference = _Reference(idiom)
    for policy in policies:
        run, low = runs(idiom, policy), LOW[policy]
        for magnitude in MAGNITUDES:
            x = idiom.activation(*magnitude).astype(low).astype(np.float32)
            want = reference.float32(x)
            factor = _factor(want.gradient[0], reference.cotangents, low)
            scaled = [np.float32(factor) * c for c in reference.cotangents]
            results, _ = returned = run(x, idiom.parameters, scaled)
            got = _numbers(returned)
            for gradient in got.gradient:
                gradient /= factor
            largest = [float(jnp.finfo(y.dtype).max) for y in results]
            if any(
                not _largest(array) <= most
                for array, most in zip(want.forward, largest, strict=True)
            ) or not all(np.isfinite(array).all() for array in want.gradient):
                continue
            for of, scaled_by in zip(PASSES, (1.0, factor), strict=True):
                if scaled_by < SMALLEST_FACTOR:
                    continue
                worst = _compared(of, reference, x, low, got, want, scaled_by)
                if worst is not None:
                    yield Case(idiom.name, policy, *magnitude, of, *worst)

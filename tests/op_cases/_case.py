"""What a case is: a JAX function for one torch op, and how to draw its arguments.

Drawn floats are rounded to bfloat16 first, so that the same case in float16, bfloat16,
float32 and float64 computes with the very same numbers, and two results differ only by
what the function did with them.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Spec:
    """One argument to draw.

    Attributes:
        shape: Its shape.
        kind: A key of `DRAWS`, which says how the values are distributed.
        bound: For integers, one more than the largest value.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    bound: int = 0


@dataclass(frozen=True)
class OpCase:
    """The JAX counterpart of one torch op.

    Attributes:
        op: The torch name, a key into `torch_op_table.json`.
        fn: The counterpart, as a user would write it. Takes only arrays.
        inputs: What to draw for each argument of `fn`.
        counterpart: What a JAX user writes, for the documentation.
        index: Which of torch's outputs the outputs of `fn` stand for, in order. Empty
            means all of them.
        traces_16bit: Whether every supported version of JAX traces `fn` on 16-bit
            floats. Where not, the others raise as late as when lowering for the CPU.
        values: Whether comparing values with a float64 reference makes sense.
    """

    op: str
    fn: Callable[..., Any]
    inputs: tuple[Spec, ...]
    counterpart: str
    index: tuple[int, ...] = ()
    traces_16bit: bool = True
    values: bool = True


def normal(*shape: int) -> Spec:
    """Standard normal values."""
    return Spec(shape)


def positive(*shape: int) -> Spec:
    """Values in (0.5, 2)."""
    return Spec(shape, "positive")


def unit(*shape: int) -> Spec:
    """Values in (0.05, 0.95)."""
    return Spec(shape, "unit")


def sign(*shape: int) -> Spec:
    """Floats that are 1 or -1."""
    return Spec(shape, "sign")


def probability(*shape: int) -> Spec:
    """Probabilities that sum to 1 over the last axis."""
    return Spec(shape, "probability")


def log_probability(*shape: int) -> Spec:
    """Logarithms of `probability`."""
    return Spec(shape, "log_probability")


def ascending(*shape: int) -> Spec:
    """Normal values, sorted over the last axis."""
    return Spec(shape, "ascending")


def spd(size: int) -> Spec:
    """A well-conditioned symmetric positive definite matrix."""
    return Spec((size, size), "spd")


def lower(size: int) -> Spec:
    """A well-conditioned lower triangular matrix."""
    return Spec((size, size), "lower")


def invertible(*shape: int) -> Spec:
    """A well-conditioned square matrix, reshaped to `shape`."""
    return Spec(shape, "invertible")


def diagonalizable(size: int) -> Spec:
    """An asymmetric matrix with real eigenvalues near 1, 2, ..."""
    return Spec((size, size), "diagonalizable")


def integer(bound: int, *shape: int) -> Spec:
    """Integers in [0, bound)."""
    return Spec(shape, "integer", bound)


def distinct(bound: int, *shape: int) -> Spec:
    """Integers in [0, bound), no two alike."""
    return Spec(shape, "distinct", bound)


def pivots(size: int) -> Spec:
    """Row interchanges of an LU decomposition: the i-th is in [i, size)."""
    return Spec((size,), "pivots", size)


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _spd(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    size = spec.shape[0]
    factor = rng.standard_normal((size, size))
    return factor @ factor.T / size + np.eye(size)


def _lower(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    below = np.tril(rng.standard_normal(spec.shape), -1) / 4
    return below + np.diag(rng.uniform(1.0, 2.0, spec.shape[0]))


def _invertible(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    size = math.isqrt(math.prod(spec.shape))
    matrix = rng.standard_normal((size, size)) / 4 + 2 * np.eye(size)
    return matrix.reshape(spec.shape)


def _diagonalizable(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    size = spec.shape[0]
    basis = _invertible(rng, spec)
    return basis @ np.diag(np.arange(1.0, size + 1)) @ np.linalg.inv(basis)


def _distinct(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    return rng.permutation(spec.bound)[: math.prod(spec.shape)].reshape(spec.shape)


def _pivots(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    return np.array([rng.integers(i, spec.bound) for i in range(spec.bound)])


DRAWS: dict[str, Callable[[np.random.Generator, Spec], np.ndarray]] = {
    "normal": lambda rng, spec: rng.standard_normal(spec.shape),
    "positive": lambda rng, spec: rng.uniform(0.5, 2.0, spec.shape),
    "unit": lambda rng, spec: rng.uniform(0.05, 0.95, spec.shape),
    "sign": lambda rng, spec: rng.choice([-1.0, 1.0], spec.shape),
    "probability": lambda rng, spec: _softmax(rng.standard_normal(spec.shape)),
    "log_probability": lambda rng, spec: np.log(
        _softmax(rng.standard_normal(spec.shape))
    ),
    "ascending": lambda rng, spec: np.sort(rng.standard_normal(spec.shape)),
    "spd": _spd,
    "lower": _lower,
    "invertible": _invertible,
    "diagonalizable": _diagonalizable,
    "integer": lambda rng, spec: rng.integers(0, spec.bound, spec.shape),
    "distinct": _distinct,
    "pivots": _pivots,
}


def draw(case: OpCase, dtype: Any) -> list[jax.Array]:
    """Draws the arguments of a case, always the same ones.

    Args:
        case: The case.
        dtype: The dtype of the floating-point arguments. For float64, call this with
            64-bit types enabled.

    Returns:
        One array per entry of `case.inputs`; integers are int32.
    """
    rng = np.random.default_rng(zlib.crc32(case.op.encode()))
    # JAX 0.10 compiles a program for `jnp.asarray` of each shape, and none for this.
    arguments = []
    for spec in case.inputs:
        value = DRAWS[spec.kind](rng, spec)
        if np.issubdtype(value.dtype, np.floating):
            value = np.asarray(value, jnp.bfloat16).astype(np.float64)
            arguments.append(jax.device_put(value.astype(dtype)))
        else:
            arguments.append(jax.device_put(value.astype(np.int32)))
    return arguments

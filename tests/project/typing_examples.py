"""What type checkers see of jamp's transforms; `make test` runs mypy on it."""

from typing import assert_type

import jax
import jax.numpy as jnp

import jamp


@jamp.autocast
def decorated(x: jax.Array, power: int = 2) -> jax.Array:
    return x**power


@jamp.autocast(dtype=jnp.bfloat16, enabled=True)
def with_options(x: jax.Array, *, power: int = 2) -> tuple[jax.Array, str]:
    with jamp.autocast(enabled=False):
        return x**power, "as written"


def called(x: jax.Array) -> float:
    return float(x.sum())


class Model:
    @jamp.autocast
    def __call__(self, x: jax.Array) -> jax.Array:
        return x

    @jamp.autocast(device_type="gpu")
    def loss(self, x: jax.Array) -> float:
        return called(x)


@jamp.custom_fwd
def forward(x: jax.Array) -> tuple[jax.Array, int]:
    return x, 1


@jamp.custom_fwd(cast_inputs=jnp.float32)
def forward_cast(x: jax.Array) -> tuple[jax.Array, int]:
    return x, 1


@jamp.custom_bwd(cast_inputs=jnp.float32)
def backward(residuals: int, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent * residuals,)


def check(x: jax.Array, policy: jamp.Policy) -> None:
    assert_type(decorated(x, power=3), jax.Array)
    assert_type(with_options(x), tuple[jax.Array, str])
    assert_type(jamp.autocast(called)(x), float)
    assert_type(jamp.autocast(called, policy=policy, output_dtype="float32")(x), float)
    assert_type(Model()(x), jax.Array)
    assert_type(Model().loss(x), float)
    assert_type(forward(x), tuple[jax.Array, int])
    assert_type(forward_cast(x), tuple[jax.Array, int])
    assert_type(backward(1, x), tuple[jax.Array])
    assert_type(jamp.custom_bwd(called)(x), float)


def check_mistakes(x: jax.Array) -> None:
    """Calls that a checker refuses; the comment of one that it takes is an error."""
    decorated("x")  # type: ignore[arg-type]
    decorated(x, exponent=3)  # type: ignore[call-arg]
    with_options(x, 3)  # type: ignore[call-arg]
    jamp.autocast(called)("x")  # type: ignore[arg-type]
    jamp.autocast(called, device="gpu")  # type: ignore[call-overload]
    jamp.autocast(called(x))  # type: ignore[call-overload]
    forward_cast(1)  # type: ignore[arg-type]

"""What a construct is: a small program around a matmul, and its arguments."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Standard normal float32 values times a scale."""
    return jax.random.normal(jax.random.key(seed), shape) * scale


def square() -> tuple[jax.Array, jax.Array]:
    """Activations and a weight, both 4x4."""
    return normal(4, 4), normal(4, 4, seed=1, scale=0.5)


def matrix() -> jax.Array:
    """A 4x4 matrix."""
    return normal(4, 4)


def images() -> jax.Array:
    """Two 5x5 images of three channels."""
    return normal(2, 5, 5, 3)


def sequences() -> jax.Array:
    """Two sequences of five steps."""
    return normal(2, 5, 4)


@dataclass(frozen=True)
class Construct:
    """A program that goes through one construct of JAX or of a library on it.

    Attributes:
        name: What it shows, as part of a test's name.
        fn: The program, written in float32 as a user would.
        make: Makes the arguments of `fn`: pytrees whose leaves are arrays.
        no_gradient: Why JAX itself cannot differentiate `fn` in reverse mode.
        no_vmap: Why JAX itself cannot batch `fn`.
        kept: How many matmuls and convolutions of the rewritten forward program the
            policy leaves in float32; a comment at the case says why.
        kept_backward: The same for the program of its gradient.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]] = square
    no_gradient: str = ""
    no_vmap: str = ""
    kept: int = 0
    kept_backward: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """The arguments, the same ones each time."""
        return made(self.make)

    def shapes(self) -> tuple[Any, ...]:
        """The arguments without their values: nothing is compiled to make them."""
        return jax.eval_shape(self.make)


@functools.cache
def made(make: Callable[[], Any]) -> Any:
    """What a function without arguments gives."""
    return make()

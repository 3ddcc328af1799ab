"""What an idiom is: a function written by hand, and what it is called with."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Standard deviation and mean of the activations.
MAGNITUDES = ((0.01, 0), (1, 0), (30, 0), (300, 0), (1, 20), (30, 20), (300, 20))


class Idiom(NamedTuple):
    """A function as users write it, of a 16-bit activation and float32 parameters.

    Attributes:
      fn: takes the activation and the parameters.
      shape: the activation's; its last dimension comes out of a product.
      parameters: arrays; those of integers are not differentiated.
      steps: how many roundings one after another are its nature.
    """

    fn: Callable[..., Any]
    shape: tuple[int, ...]
    parameters: tuple[np.ndarray, ...]
    steps: int = 8

    @property
    def name(self) -> str:
        return self.fn.__name__

    def activation(self, std: float, mean: float) -> np.ndarray:
        """Float32 numbers; a product rounds them."""
        normal = _rng(self.name).standard_normal(self.shape, np.float32)
        return mean + std * normal


def _rng(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Numbers for a parameter."""
    return mean + std * _rng(shape, std, mean).standard_normal(shape, np.float32)


def scale(n: int) -> np.ndarray:
    """Factors as norms learn them."""
    return normal(n, std=0.1, mean=1.0)


def bias(n: int) -> np.ndarray:
    return normal(n, std=0.1)


def labels(n: int, classes: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32) * 7 % classes


def one_hot(n: int, classes: int) -> np.ndarray:
    return np.eye(classes, dtype=np.float32)[labels(n, classes)]


class Table(dict[str, Idiom]):
    """The idioms of one file, by name."""

    def add(
        self, *parameters: Any, x: tuple[int, ...] = (8, 32), steps: int = 8
    ) -> Callable[..., Any]:
        """Takes down the function below, which is called with these parameters."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            assert fn.__name__ not in self
            arrays = tuple(
                p if isinstance(p, np.ndarray) else np.float32(p) for p in parameters
            )
            self[fn.__name__] = Idiom(fn, x, arrays, steps)
            return fn

        return decorate

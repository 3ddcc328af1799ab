"""Named trees of gradients, shared by tests and benchmarks."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Tree = dict[str, jax.ShapeDtypeStruct]


def resnet50() -> Tree:
    """Gradients of ResNet-50: 161 leaves, 25.6 million numbers."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"] = (size, size, inputs, outputs)
        shapes[f"{name}/scale"] = shapes[f"{name}/bias"] = (outputs,)

    convolution("stem", 7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            convolution(f"{name}/conv0", 1, inputs, width)
            convolution(f"{name}/conv1", 3, width, width)
            convolution(f"{name}/conv2", 1, width, 4 * width)
            if block == 0:
                convolution(f"{name}/shortcut", 1, inputs, 4 * width)
            inputs = 4 * width
    shapes |= {"head/kernel": (2048, 1000), "head/bias": (1000,)}
    return _float32(shapes)


def gpt2() -> Tree:
    """Gradients of GPT-2: 148 leaves, 124 million numbers."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, 768), "wpe": (1024, 768)}
    for layer in range(12):
        for name, outputs, inputs in (
            ("attention/qkv", 2304, 768),
            ("attention/projection", 768, 768),
            ("mlp/up", 3072, 768),
            ("mlp/down", 768, 3072),
        ):
            shapes[f"h{layer}/{name}/kernel"] = (inputs, outputs)
            shapes[f"h{layer}/{name}/bias"] = (outputs,)
        for name in ("norm0", "norm1"):
            shapes[f"h{layer}/{name}/scale"] = shapes[f"h{layer}/{name}/bias"] = (768,)
    shapes["norm/scale"] = shapes["norm/bias"] = (768,)
    return _float32(shapes)


def llama_1b() -> Tree:
    """Gradients of a 1B Llama: 146 leaves, 1.24 billion numbers."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (128256, 2048)}
    for layer in range(16):
        for name, shape in (
            ("query", (2048, 2048)),
            ("key", (2048, 512)),
            ("value", (2048, 512)),
            ("output", (2048, 2048)),
            ("gate", (2048, 8192)),
            ("up", (2048, 8192)),
            ("down", (8192, 2048)),
            ("norm0", (2048,)),
            ("norm1", (2048,)),
        ):
            shapes[f"layer{layer}/{name}"] = shape
    shapes["norm"] = (2048,)
    return _float32(shapes)


def one_leaf(mebibytes: int) -> Tree:
    """A single leaf of a size in MiB."""
    return _float32({"leaf": (mebibytes * 2**18,)})


def mixed() -> Tree:
    """Every inexact dtype of 1 to 8 bytes a number, in sizes that fit no block."""
    dtypes = (
        jnp.float32,
        jnp.float16,
        jnp.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        jnp.complex64,
    )
    shapes = ((), (0,), (1,), (3, 5), (64,), (7, 64), (4096,), (4097,), (130, 64))
    return {
        f"{jnp.dtype(dtype).name}{list(shape)}": jax.ShapeDtypeStruct(shape, dtype)
        for shape in shapes
        for dtype in dtypes
    }


def large_and_tiny(number: int = 70) -> Tree:
    """Two leaves of several tiles among more tiny ones than a launch takes."""
    tiny = {f"tiny{k}": (64,) for k in range(number)}
    return _float32({"first": (300, 64), **tiny, "last": (20_000,)})


# Small enough for interpret mode on a CPU.
SMALL = {"mixed": mixed, "large_and_tiny": large_and_tiny}
# The trees of real models.
MODELS = {"resnet50": resnet50, "gpt2": gpt2, "llama_1b": llama_1b}


def bytes_of(tree: Tree) -> int:
    """How many bytes the leaves of a tree hold."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in tree.values())


@cache
def of_every_size(dtype: Any) -> np.ndarray:
    """65537 numbers of every size that a dtype holds, denormal ones too."""
    rng = np.random.default_rng(0)
    limits = jnp.finfo(dtype)
    ends = (float(limits.smallest_subnormal), float(limits.max))
    numbers = 10.0 ** rng.uniform(*np.log10(ends), 65537)
    numbers *= rng.choice((-1, 1), numbers.size)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        numbers = numbers + 1j * np.roll(numbers, 1)
    return numbers.astype(dtype)


def filled(tree: Tree) -> list[np.ndarray]:
    """Arrays of these numbers over and over, each leaf's from another one on."""
    return [
        np.resize(np.roll(of_every_size(leaf.dtype), 1009 * k), leaf.shape)
        for k, leaf in enumerate(tree.values())
    ]


def _float32(shapes: dict[str, Any]) -> Tree:
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }

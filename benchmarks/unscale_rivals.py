"""What the unscaling kernels are measured against, each as one program."""

import time
from collections.abc import Callable
from typing import Any

import gradient_trees
import jax
import jax.numpy as jnp
import numpy as np

from jamp.pallas_kernels import all_finite, unscale_and_check

Leaves = list[jax.Array]
Program = Callable[[Leaves, jax.Array], tuple[Leaves, jax.Array]]


def unscale_with(implementation: str) -> Program:
    def program(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        return unscale_and_check(leaves, inv_scale, implementation=implementation)

    return program


def check_with(implementation: str) -> Program:
    def program(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        del inv_scale
        return leaves, ~all_finite(leaves, implementation=implementation)

    return program


def per_leaf(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
    """As one writes it with optax: two passes over the tree."""
    unscaled = [leaf * inv_scale for leaf in leaves]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    return unscaled, ~jnp.all(jnp.array(finite))


PROGRAMS: dict[str, Program] = {
    "xla": unscale_with("xla"),
    "triton": unscale_with("triton"),
    "mosaic_gpu": unscale_with("mosaic_gpu"),
    "per_leaf": per_leaf,
    "all_finite (xla)": check_with("xla"),
    "all_finite (triton)": check_with("triton"),
    "all_finite (mosaic_gpu)": check_with("mosaic_gpu"),
}


def loop(program: Program, repeats: int, at_once: int = 1) -> Program:
    """The program repeated on the device, so that no host stands between two calls.

    A loop takes some launches of its own: a round of it has `at_once` repeats.
    """

    def repeated(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        def body(_: Any, carry: Any) -> Any:
            leaves, found = carry
            more = []
            for _ in range(at_once):
                # What only reads the leaves would give the same every time, and could
                # be taken out of the loop.
                leaves, found = jax.lax.optimization_barrier((leaves, found))
                leaves, one = program(list(leaves), inv_scale)
                more.append(one)
            return leaves, found | jnp.stack(more).any()

        rounds = repeats // at_once
        return jax.lax.fori_loop(0, rounds, body, (leaves, jnp.array(False)))

    return repeated


class State:
    """A tree on the device, which every program gets from the one before it."""

    def __init__(self, tree: gradient_trees.Tree, numbers: np.ndarray):
        self.tree, self.numbers = tree, numbers
        self.leaves: Leaves | None = None

    def run(self, program: Callable[..., Any]) -> jax.Array:
        """Runs a program in place; what it found."""
        if self.leaves is None:
            arrays = [
                self.numbers[: x.size].reshape(x.shape) for x in self.tree.values()
            ]
            self.leaves = jax.device_put(arrays)
        # A program that fails may have overwritten them.
        leaves, self.leaves = self.leaves, None
        self.leaves, found = program(leaves, np.float32(1))
        return found


def timed(
    program: Callable[..., Any], state: State, repeats: int
) -> Callable[[], float]:
    """A call that runs a program of so many repeats; seconds of one on the device."""

    def several(calls: int) -> float:
        start = time.perf_counter()
        found = [state.run(program) for _ in range(calls)]
        if any(map(bool, found)):  # waits for the device
            raise AssertionError("it found an inf where there is none")
        return time.perf_counter() - start

    # The host hands over what comes after the first call while the device is busy, so
    # that the difference holds nothing of the host's.
    return lambda: (several(3) - several(1)) / 2 / repeats


class TorchFused:
    """`torch.amp.GradScaler`'s own kernel, timed on the device by events."""

    def __init__(self, tree: gradient_trees.Tree, repeats: int):
        import torch

        self.torch, self.repeats = torch, repeats
        self.grads = [torch.randn(leaf.shape, device="cuda") for leaf in tree.values()]
        self.found = torch.zeros(1, device="cuda")
        self.scale = torch.ones(1, device="cuda")

    def eager(self) -> Callable[[], float]:
        return lambda: self.seconds(self.call)

    def graph(self) -> Callable[[], float]:
        self.call()
        captured = self.torch.cuda.CUDAGraph()
        # XLA may still be compiling in other threads, which is none of the graph's.
        with self.torch.cuda.graph(captured, capture_error_mode="thread_local"):
            self.call()
        return lambda: self.seconds(captured.replay)

    def call(self) -> None:
        self.torch._amp_foreach_non_finite_check_and_unscale_(
            self.grads, self.found, self.scale
        )

    def seconds(self, run: Callable[[], None]) -> float:
        """Seconds of one run."""
        seconds = _on_device(run, self.repeats)
        if float(self.found):
            raise AssertionError("torch found an inf where there is none")
        return seconds


def torch_with_gpu() -> Any:
    """PyTorch, or None if it or its GPU is missing."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def copied(size: int, repeats: int) -> Callable[[], float]:
    """A call that copies so many bytes on the device; seconds of one copy."""
    torch = torch_with_gpu()
    if torch is None:
        return _copied_by_xla(size, repeats)
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    return lambda: _on_device(lambda: target.copy_(source), repeats)


def _on_device(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of one run of torch, between events on the device."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _copied_by_xla(size: int, repeats: int) -> Callable[[], float]:
    source = jax.random.normal(jax.random.key(0), (size // 4,))
    copy = jax.jit(jnp.copy)

    def call() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            target = copy(source)
        target.block_until_ready()
        return (time.perf_counter() - start) / repeats

    return call

"""What the unscaling kernels are measured against, each as one program."""

import time
from collections.abc import Callable
from typing import Any

import gradient_trees
import jax
import jax.numpy as jnp

from jamp.pallas_kernels import all_finite, unscale_and_check

Leaves = list[jax.Array]
Program = Callable[[Leaves, jax.Array], tuple[Leaves, jax.Array]]


def unscale_with(implementation: str) -> Program:
    def program(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        return unscale_and_check(leaves, inv_scale, implementation=implementation)

    return program


def check_with(implementation: str) -> Program:
    def program(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        # A use of the scale keeps the check inside the loop that repeats it.
        leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].multiply(inv_scale)
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
}


def loop(program: Program, repeats: int) -> Any:
    """The program repeated on the device, so that no host stands between two calls."""

    def repeated(leaves: Leaves, inv_scale: jax.Array) -> tuple[Leaves, jax.Array]:
        def body(_: Any, carry: Any) -> Any:
            leaves, found = carry
            leaves, more = program(list(leaves), inv_scale)
            return leaves, found | more

        return jax.lax.fori_loop(0, repeats, body, (leaves, jnp.array(False)))

    return jax.jit(repeated, donate_argnums=0)


class TorchFused:
    """`torch.amp.GradScaler`'s own kernel, timed on the device by events."""

    def __init__(self, tree: gradient_trees.Tree, repeats: int, *, graph: bool = False):
        import torch

        self.torch, self.repeats = torch, repeats
        self.grads = [torch.randn(leaf.shape, device="cuda") for leaf in tree.values()]
        self.found = torch.zeros(1, device="cuda")
        self.scale = torch.ones(1, device="cuda")
        self.run = self.call
        if graph:
            self.call()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self.call()
            self.run = captured.replay

    def call(self) -> None:
        self.torch._amp_foreach_non_finite_check_and_unscale_(
            self.grads, self.found, self.scale
        )

    def seconds(self) -> float:
        """Seconds of one call."""
        seconds = _on_device(self.run, self.repeats)
        if float(self.found):
            raise AssertionError("torch found an inf where there is none")
        return seconds


def copied(size: int, repeats: int) -> Callable[[], float]:
    """A call that copies so many bytes on the device; seconds of one copy."""
    try:
        import torch
    except ImportError:
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

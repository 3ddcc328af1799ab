"""The unscaling benchmark's programs, compiled beside each other or for an H200."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import gradient_trees
import jax
import jax.numpy as jnp
from rich.progress import track

from jamp.pallas_kernels.unscale import backends, reference, with_kernel
from jamp.pallas_kernels.unscale.launches import Request

REQUEST = Request()
SCALE = jax.ShapeDtypeStruct((), jnp.float32)
# The share of a budget after which nothing is compiled any more.
COMPILING = 0.5


class Budget:
    """How many seconds a run may take, from now on; None for as many as it takes."""

    def __init__(self, seconds: float | None = None):
        self.start = time.monotonic()
        self.seconds = float("inf") if seconds is None else seconds

    def used(self) -> float:
        return time.monotonic() - self.start

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is used, not below 0."""
        return max(0.0, share * self.seconds - self.used())


class Programs:
    """Programs that are compiled beside each other while there is time for it."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.futures: dict[Any, Future[Any]] = {}
        # What each took to compile, beside the others.
        self.seconds: dict[Any, float] = {}

    def add(
        self, name: Any, program: Callable[..., Any], *shapes: Any, donate: Any = ()
    ) -> None:
        """Traces and lowers a program here, and leaves its compilation to a thread."""
        if not self.budget.left(COMPILING):
            return
        try:
            lowered = lower(program, shapes, donate)
        except Exception as error:  # noqa: BLE001 - one program's failure is a result
            self.futures[name] = Future()
            self.futures[name].set_exception(error)
        else:
            self.futures[name] = self.pool.submit(self._compiled, name, lowered)

    def _compiled(self, name: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        start = time.perf_counter()
        compiled = lowered.compile()
        self.seconds[name] = time.perf_counter() - start
        return compiled

    def wait(self) -> None:
        """Waits for all of them, or until their share of the budget is used."""
        left = self.budget.left(COMPILING)
        wait(self.futures.values(), None if left == float("inf") else left)
        for future in self.futures.values():
            future.cancel()

    def refuse(self, kernel: str, reason: str) -> None:
        """Has `get` raise for the programs of a kernel."""
        for name in self.futures:
            if kernel in name[1]:
                self.futures[name].cancel()
                self.futures[name] = Future()
                self.futures[name].set_exception(RuntimeError(reason))

    def compiling(self) -> int:
        """How many are being compiled."""
        return sum(not future.done() for future in self.futures.values())

    def get(self, name: Any) -> jax.stages.Compiled:
        """A compiled program, or the error that there was instead."""
        future = self.futures.get(name)
        if future is None or future.cancelled() or not future.done():
            raise TimeoutError("no time was left to compile it")
        return future.result()

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.compiling():
            # XLA's compiler can't be told to stop, and Python would wait for it.
            if error:
                traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if error else 0)


def lower(
    program: Callable[..., Any], shapes: Sequence[Any], donate: Any
) -> jax.stages.Lowered:
    return jax.jit(program, donate_argnums=donate).lower(*shapes)


def programs(
    trees: dict[str, Callable[[], gradient_trees.Tree]],
) -> list[dict[str, Any]]:
    """For every tree and implementation: kernels, bytes in place, compilation time."""
    # It hides a GPU that there is, so it waits until it is clear that none is wanted.
    from deviceless import compile_for_h200, kernels

    rows = []
    for name, implementation in track(
        [(n, i) for n in trees for i in ("xla", "triton", "mosaic_gpu")], "compiling"
    ):
        tree = trees[name]()
        leaves = list(tree.values())
        start = time.perf_counter()
        program = _program(implementation)
        compiled = compile_for_h200(program, leaves, SCALE, donate=(0,))
        seconds = time.perf_counter() - start
        rows.append(
            {
                "tree": name,
                "leaves": len(leaves),
                "bytes": gradient_trees.bytes_of(tree),
                "program": implementation,
                "kernels": kernels(compiled),
                "bytes_in_place": compiled.memory_analysis().alias_size_in_bytes,
                "compile_seconds": seconds,
            }
        )
    return rows


def _program(implementation: str) -> Callable[..., Any]:
    """As `unscale_and_check` runs it, which would ask for a GPU."""
    if implementation == "xla":
        return lambda leaves, scale: reference.run(leaves, scale, REQUEST)
    kernel = backends.load(implementation)
    return lambda leaves, scale: with_kernel(kernel, leaves, scale, REQUEST)

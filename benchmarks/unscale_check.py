"""Compares the compiled unscaling kernels with the reference on the card itself."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gradient_trees
import jax
import numpy as np
from rich.progress import track
from unscale_programs import SCALE, Budget, Programs

from jamp.pallas_kernels import all_finite, unscale_and_check
from jamp.pallas_kernels.unscale import backends

CASES = {
    **gradient_trees.SMALL,
    "resnet50": gradient_trees.resnet50,
    "gpt2": gradient_trees.gpt2,
}
# As they come, of a loss scaled by 65536 and by no power of two, and some overflow.
INV_SCALES = (1.0, 2.0**-16, 1 / 1536, 2.0**20)
POISONS = (np.inf, -np.inf, np.nan)
# The share of a budget after which nothing is compared any more.
CHECKING = 0.75
TRIAL = """
import jax.numpy as jnp
from jamp.pallas_kernels import all_finite, unscale_and_check
tree = [jnp.ones((300, 64)), jnp.ones(64), jnp.ones((3, 5), jnp.bfloat16)]
unscaled, found = unscale_and_check(tree, 0.5, implementation={kernel!r})
assert float(unscaled[0].sum()) == 150 * 64 and not found
assert all_finite(tree, implementation={kernel!r})
"""
TRIAL_SECONDS = 90


def add_program(programs: Programs, implementation: str, case: str) -> None:
    """Adds the one program that makes all comparisons of a tree."""

    def run(leaves: Any, inv_scale: Any) -> Any:
        unscaled = unscale_and_check(leaves, inv_scale, implementation=implementation)
        return *unscaled, all_finite(leaves, implementation=implementation)

    leaves = list(CASES[case]().values())
    programs.add(("check", implementation, case), run, leaves, SCALE)


def why_not(kernel: str) -> list[str]:
    """Why a kernel can't run here; a small run of it in a process of its own is tried.

    A kernel that hangs, or reads where it may not, takes its whole process with it.
    """
    reasons = backends.why_not(kernel)
    if reasons:
        return reasons
    try:
        subprocess.run(
            [sys.executable, "-c", TRIAL.format(kernel=kernel)],
            check=True,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"a first run did not end in {TRIAL_SECONDS} s"]
    except subprocess.CalledProcessError as error:
        return [f"a first run failed: {error.stderr.strip().splitlines()[-1:]}"]
    return []


def check_on_card(
    programs: Programs, budget: Budget, reasons_of: dict[str, list[str]]
) -> dict[str, Any]:
    """For each kernel the comparisons and differences, and what kept it from them."""
    checks: dict[str, Any] = {}
    for kernel, reasons in reasons_of.items():
        checks[kernel] = {"compared": 0, "differences": []}
        if reasons:
            checks[kernel] = {"cannot_run": reasons}
    for case in track(CASES, "checking"):
        _check(case, checks, programs, budget)
    for kernel, check in checks.items():
        if "compared" in check:
            found = f"{check['compared']} comparisons, {len(check['differences'])}"
            print(f"{kernel}: {found} differences, {check.get('cannot_check', {})}")
            print("\n".join(check["differences"][:10]))
    return checks


def passed(check: dict[str, Any]) -> bool:
    """Whether a kernel was compared with the reference everywhere, and equals it."""
    failed = check.get("differences") or check.get("cannot_check")
    return bool(check.get("compared")) and not failed


def _check(
    case: str, checks: dict[str, Any], programs: Programs, budget: Budget
) -> None:
    ready: dict[str, Callable[..., Any]] = {}

    def give_up(kernel: str, reason: Any) -> None:
        checks[kernel].setdefault("cannot_check", {})[case] = str(reason)[:200]
        ready.pop(kernel, None)

    for kernel in (kernel for kernel in checks if "compared" in checks[kernel]):
        try:
            reference = programs.get(("check", "xla", case))
            ready[kernel] = programs.get(("check", kernel, case))
        except Exception as error:  # noqa: BLE001 - why it can't be checked is a result
            give_up(kernel, error)
    if not ready:
        return
    for what, leaves, inv_scale in _inputs(case):
        if not budget.left(CHECKING):
            for kernel in list(ready):
                give_up(kernel, "no time was left to compare it")
            return
        expected = jax.device_get(reference(leaves, inv_scale))
        for kernel, program in list(ready.items()):
            checks[kernel]["compared"] += 1
            try:
                found = jax.device_get(program(leaves, inv_scale))
                problem = difference(found, expected)
            except Exception as error:  # noqa: BLE001 - a kernel that fails is not chosen
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            if problem:
                checks[kernel]["differences"].append(f"{what}: {problem}")


def _inputs(case: str) -> Iterator[tuple[str, list[Any], np.float32]]:
    """What a tree is compared on: its name, the leaves, and the inverse scale."""
    leaves = gradient_trees.filled(CASES[case]())
    on_device = jax.device_put(leaves)
    for inv_scale in INV_SCALES:
        yield f"{case} times {inv_scale}", on_device, np.float32(inv_scale)
    if case != "large_and_tiny":
        return
    places = itertools.product(POISONS, (0, len(leaves) // 2, -1), (0, 0.5, 1))
    for poison, leaf, place in places:
        poisoned = leaves[leaf].copy()
        poisoned.flat[int(place * (poisoned.size - 1))] = poison
        arrays = list(on_device)
        arrays[leaf] = jax.device_put(poisoned)
        yield f"{poison} in leaf {leaf} at {place}", arrays, np.float32(2.0**-16)


def difference(found: Any, expected: Any) -> str | None:
    """What differs between two results, or None if nothing does."""
    for k, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        if not _same(np.asarray(one), np.asarray(other)):
            return f"leaf {k} {one.dtype}{list(one.shape)} differs"
    ours, theirs = ([bool(flag) for flag in result[1:]] for result in (found, expected))
    if ours != theirs:
        return f"not finite, finite: {ours} instead of {theirs}"
    return None


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether arrays are equal bit for bit, but for the payload of a NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dtype.kind == "c":
        one, other = (x.reshape(-1).view(x.real.dtype) for x in (one, other))
    bits = np.dtype(f"u{one.dtype.itemsize}")
    differ = one.reshape(-1).view(bits) != other.reshape(-1).view(bits)
    if not differ.any():
        return True
    numbers = (x.reshape(-1)[differ].astype(np.float64) for x in (one, other))
    return all(np.isnan(x).all() for x in numbers)

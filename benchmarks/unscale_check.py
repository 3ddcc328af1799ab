"""Compares the compiled unscaling kernels with the reference on the card itself."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import gradient_trees
import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from jamp.pallas_kernels import all_finite, unscale_and_check
from jamp.pallas_kernels.unscale import backends

CASES = {
    **gradient_trees.SMALL,
    "resnet50": gradient_trees.resnet50,
    "gpt2": gradient_trees.gpt2,
}
# As they come, as a gradient of a loss scaled by 65536, and one that overflows.
INV_SCALES = (1.0, 2.0**-16, 1 / 1536, 2.0**20)
POISONS = (None, np.inf, -np.inf, np.nan)


def check_on_card() -> dict[str, Any]:
    """For each kernel the comparisons and differences, or why it can't run."""
    checks: dict[str, Any] = {}
    for kernel in backends.KERNELS:
        reasons = backends.why_not(kernel)
        if reasons:
            checks[kernel] = {"cannot_run": reasons}
            continue
        compared, differences = 0, []
        for name, leaves, inv_scale in track(list(_cases()), f"checking {kernel}"):
            compared += 1
            problem = _difference(kernel, leaves(), inv_scale)
            if problem:
                differences.append(f"{name} times {inv_scale}: {problem}")
        checks[kernel] = {"compared": compared, "differences": differences}
        print(f"{kernel}: {compared} comparisons, {len(differences)} differences")
        print("\n".join(differences[:10]))
    return checks


def _cases() -> Iterator[tuple[str, Any, float]]:
    for (name, make), inv_scale in itertools.product(CASES.items(), INV_SCALES):
        yield name, lambda make=make: _filled(make()), inv_scale
    tree = gradient_trees.large_and_tiny()
    for poison, leaf, place in itertools.product(POISONS, (0, 36, -1), (0, 0.5, 1)):
        yield (
            f"{poison} in leaf {leaf} at {place}",
            lambda p=poison, k=leaf, at=place: _poisoned(_filled(tree), p, k, at),
            2.0**-16,
        )


def _filled(tree: gradient_trees.Tree) -> list[jax.Array]:
    """Random numbers of every size that the dtype holds, denormal ones too."""
    rng = np.random.default_rng(0)
    leaves = []
    for leaf in tree.values():
        exponents = rng.uniform(-40, 4, leaf.shape)
        numbers = rng.standard_normal(leaf.shape) * 10.0**exponents
        leaves.append(jnp.asarray(numbers.astype(leaf.dtype)))
    return leaves


def _poisoned(
    leaves: list[jax.Array], poison: float | None, leaf: int, place: float
) -> list[jax.Array]:
    if poison is not None:
        flat = leaves[leaf].ravel()
        flat = flat.at[int(place * (flat.size - 1))].set(poison)
        leaves[leaf] = flat.reshape(leaves[leaf].shape)
    return leaves


@functools.partial(jax.jit, static_argnums=2)
def _run(leaves: list[jax.Array], inv_scale: float, implementation: str) -> Any:
    found = unscale_and_check(leaves, inv_scale, implementation=implementation)
    return found, all_finite(leaves, implementation=implementation)


def _difference(kernel: str, leaves: list[jax.Array], inv_scale: float) -> str | None:
    (ours, found), finite = jax.device_get(_run(leaves, inv_scale, kernel))
    expected, expected_finite = jax.device_get(_run(leaves, inv_scale, "xla"))
    for k, (one, other) in enumerate(zip(ours, expected[0], strict=True)):
        # A NaN is a NaN, whatever its payload.
        if not np.array_equal(
            *(np.asarray(x, np.complex128) for x in (one, other)), True
        ):
            return f"leaf {k} {one.dtype}{list(one.shape)} differs"
        if (
            one.tobytes() != other.tobytes()
            and not np.isnan(np.asarray(one, complex)).any()
        ):
            return f"leaf {k} {one.dtype}{list(one.shape)} differs in a bit"
    if (found, finite) != (expected[1], expected_finite):
        return f"found {found}, finite {finite} instead of {expected[1]}"
    return None

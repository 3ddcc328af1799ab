"""Unscaling of gradients, and the check whether all of them are finite."""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.numpy as jnp

from jamp.pallas_kernels.unscale import reference
from jamp.pallas_kernels.unscale.backends import chosen, fastest
from jamp.pallas_kernels.unscale.launches import Request, Results, on_shards


def unscale_and_check(
    tree: Any, inv_scale: Any, *, implementation: str = "auto"
) -> tuple[Any, jax.Array]:
    """Multiplies every gradient by the inverse of the loss scale and checks them all.

    Sharded arrays keep their shardings, and only what was found crosses
    devices; inside `jax.shard_map` it is what the device's own shards hold.

    Args:
      tree: a pytree of arrays. Floating and complex leaves are multiplied in at least
        float32 and rounded back to their dtype; others pass through.
      inv_scale: the inverse of the loss scale, float32[].
      implementation: `'xla'` for plain JAX; `'triton'` or `'mosaic_gpu'` for a Pallas
        kernel, which takes float32, float16 and bfloat16, leaves the rest to XLA, and
        reads and writes each gradient once, in place where its buffer is free to be
        overwritten. `'auto'` only checks with a kernel, that which was measured to be
        the fastest on this kind of device, if one was: XLA multiplies where the
        gradients are used, and need not write them.

    Returns:
      The tree unscaled, and a bool[] that is True where a leaf holds an inf or a NaN,
      before or after.

    Raises:
      ValueError: an unknown implementation.
      TypeError: a leaf is no array.
      NotImplementedError: the implementation can't run here; with every reason.
    """
    leaves, treedef = jax.tree.flatten(tree)
    unscaled, not_finite = _run(leaves, inv_scale, Request(), implementation)
    return jax.tree.unflatten(treedef, unscaled), not_finite > 0


def all_finite(tree: Any, *, implementation: str = "auto") -> jax.Array:
    """Checks whether a tree holds neither an inf nor a NaN.

    Reads every leaf once and writes none; for steps that unscale in the optimizer.

    Args:
      tree: a pytree of arrays; only floating and complex leaves matter.
      implementation: as for `unscale_and_check`.

    Returns:
      A bool[].

    Raises:
      ValueError: an unknown implementation.
      TypeError: a leaf is no array.
      NotImplementedError: the implementation can't run here; with every reason.
    """
    request = Request(unscale=False)
    _, not_finite = _run(jax.tree.leaves(tree), None, request, implementation)
    return not_finite == 0


def _run(
    leaves: list[Any], inv_scale: Any, request: Request, implementation: str
) -> Results:
    for leaf in leaves:
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"give a tree of arrays; a leaf of it is {leaf!r:.80}")
    every = dict(enumerate(leaves))
    inexact = {k: x for k, x in every.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    numbers = list(inexact.values())
    scale = jnp.asarray(1 if inv_scale is None else inv_scale, jnp.float32)
    auto = implementation == "auto"
    module = fastest(numbers) if auto else chosen(implementation)
    if module is reference:
        by = None if inv_scale is None else scale
        unscaled, not_finite = reference.run(numbers, by, request)
    elif auto:
        unscaled, not_finite = _checked_with(module, numbers, scale, request.unscale)
    else:
        unscaled, not_finite = with_kernel(module, numbers, scale, request)
    # Where nothing was to be unscaled, there are no arrays.
    every.update(zip(inexact, unscaled, strict=False))
    return list(every.values()), not_finite


@partial(jax.jit, static_argnums=(0, 3), inline=True)
def _checked_with(
    module: Any, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> Results:
    """Checks with a kernel, and multiplies without."""
    check = Request(unscale=False)
    # The default device has the kernel; the program may be for another.
    _, not_finite = jax.lax.platform_dependent(
        leaves,
        inv_scale,
        cuda=partial(with_kernel, module, request=check),
        default=partial(reference.run, request=check),
    )
    return reference.unscaled(leaves, inv_scale) if unscale else [], not_finite


@partial(jax.jit, static_argnums=(0, 3))
def with_kernel(
    module: Any, leaves: Sequence[jax.Array], inv_scale: jax.Array, request: Request
) -> Results:
    """Runs a kernel on the leaves that it takes, and the reference on the rest.

    Under `jax.vmap` and where it is differentiated, the reference runs instead.
    """

    def kernel(leaves: Sequence[jax.Array], inv_scale: jax.Array) -> Results:
        # These are the shards of a device: whether it takes them depends on their size.
        takes = [module.takes(leaf) for leaf in leaves]
        taken, rest = compress(leaves, takes), compress(leaves, map(not_, takes))
        outputs, not_finite = reference.run(list(rest), inv_scale, request)
        if not any(takes):
            return outputs, not_finite
        by_kernel, found = module.run(list(taken), inv_scale, request)
        sources = {True: iter(by_kernel), False: iter(outputs)}
        merged = [next(sources[take]) for take in takes] if request.unscale else []
        return merged, not_finite + found

    def plain(leaves: Any, inv_scale: Any) -> Any:
        return reference.run(leaves, inv_scale, request)

    def batch(_: int, batched: Any, *args: Any) -> Any:
        axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(batched))
        results = jax.vmap(plain, in_axes=axes)(*args)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_batching.custom_vmap
    def run(leaves: Any, inv_scale: Any) -> Any:
        return on_shards(kernel, leaves, inv_scale, request.unscale)

    run.def_vmap(batch)
    differentiable = jax.custom_jvp(run)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    results: Results = differentiable(list(leaves), inv_scale)
    return results

"""Runs an idiom in torch, from the text that is written for JAX.

The function's globals `jnp`, `jax` and `lax` are replaced by torch's functions of the
same meaning. `WITHOUT` names the idioms that use what has none here.
"""

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from ._idiom import Idiom

WITHOUT = frozenset(
    """
    layer_norm_equinox spectral_norm local_response_norm gaussian_nll
    gaussian_nll_softplus_variance mean_squared_error_of_two_products
    weighted_squares_over_20_000 router_probabilities_of_the_best load_balancing
    messages_of_one segment_sum segment_mean segment_variance segment_softmax
    scatter_add scatter_add_into_state embedding_lookup embedding_by_one_hot
    graph_convolution cumulative_sum_reversed prefix_sum fori_loop_that_sums
    dynamic_slices_of_a_sequence average_pool repeat_many_times sinusoids_vaswani
    sinusoids_by_matmul rotary_by_tensordot rotary_by_numpy_positions
    rotary_in_two_dimensions noised_sample time_to_vector
    diagonal_state_space_in_parallel divergence_of_bernoullis
    relative_entropy_of_classes
    """.split()
)


class Tensor(torch.Tensor):
    """A tensor with the methods of a JAX array that torch has otherwise."""

    def max(self, axis=None, keepdims=False):
        return self.amax(_dims(self, axis), keepdims)

    def min(self, axis=None, keepdims=False):
        return self.amin(_dims(self, axis), keepdims)

    def var(self, axis=None, keepdims=False, ddof=0):
        return torch.var(self, _dims(self, axis), correction=ddof, keepdim=keepdims)

    def std(self, axis=None, keepdims=False, ddof=0):
        return torch.std(self, _dims(self, axis), correction=ddof, keepdim=keepdims)

    def astype(self, dtype):
        return self.to(dtype)


def _dims(x, axis):
    return tuple(range(x.ndim)) if axis is None else axis


def _tensor(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Tensor)


def _of_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*map(_tensor, args))


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: getattr(_tensor(x), name)(*args, **kwargs)


def _scan(step, carry, xs, length=None, reverse=False):
    if isinstance(xs, tuple):
        rows = list(zip(*xs, strict=True))
    else:
        rows = [None] * length if xs is None else list(xs)
    found = []
    for row in reversed(rows) if reverse else rows:
        carry, y = step(carry, row)
        found.append(y)
    if found[0] is None:
        return carry, None
    return carry, torch.stack(found[::-1] if reverse else found)


def _norm(x, axis=None, keepdims=False):
    return torch.linalg.vector_norm(x, dim=axis, keepdim=keepdims)


class _Names(types.SimpleNamespace):
    """Torch's functions by JAX's names; those of the same name are torch's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_SAME = "sqrt exp log log1p log2 abs tanh sin cos square sign"
JNP = _Names(
    **{name: _of_tensors(getattr(torch, name)) for name in _SAME.split()},
    **{name: _method(name) for name in ("max", "min", "var", "std")},
    maximum=_of_tensors(torch.maximum),
    minimum=_of_tensors(torch.minimum),
    logaddexp=_of_tensors(torch.logaddexp),
    outer=_of_tensors(torch.outer),
    power=torch.pow,
    arange=lambda *args, **_: _tensor(torch.arange(*args)),
    clip=torch.clamp,
    concatenate=lambda xs, axis=0: torch.cat(list(xs), axis),
    stack=lambda xs, axis=0: torch.stack(list(xs), axis),
    split=lambda x, n, axis=0: torch.tensor_split(x, n, axis),
    take_along_axis=lambda x, i, axis: torch.take_along_dim(x, i, axis),
    zeros=lambda shape, *_: _tensor(torch.zeros(shape)),
    full=lambda shape, value: _tensor(torch.full(np.atleast_1d(shape).tolist(), value)),
    linalg=types.SimpleNamespace(norm=_norm),
    float32=torch.float32,
    int32=torch.int64,
)
LAX = _Names(stop_gradient=lambda x: x.detach(), scan=_scan, rsqrt=torch.rsqrt)
JAX = types.SimpleNamespace(
    lax=LAX,
    nn=_Names(elu=torch.nn.functional.elu, softmax=lambda x: torch.softmax(x, -1)),
    vmap=torch.vmap,
)
_GLOBALS = {"jnp": JNP, "jax": JAX, "lax": LAX}


def _translated(fn: Callable[..., Any]) -> Callable[..., Any]:
    known = {**fn.__globals__, **_GLOBALS}
    for name, held in fn.__globals__.items():
        if isinstance(held, types.FunctionType) and held.__module__ == fn.__module__:
            known[name] = types.FunctionType(held.__code__, known, name)
    return types.FunctionType(fn.__code__, known, fn.__name__)


def _numpy(tensor: Any) -> np.ndarray:
    array = tensor.detach().float().numpy()
    return array.astype(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else array


def in_torch(idiom: Idiom, *, cast: bool) -> Callable[..., Any]:
    """The idiom under torch.autocast on CPUs, with its results and gradients.

    Args:
      idiom: what is run.
      cast: whether its user writes `.float()` after the product that it begins with.
    """
    fn, eye = _translated(idiom.fn), torch.eye(idiom.shape[-1])

    def run(x: Any, parameters: Any, cotangents: Any) -> Any:
        x = _tensor(np.asarray(x)).requires_grad_()
        made = [
            _tensor(np.array(p, np.int64 if p.dtype.kind == "i" else p.dtype))
            for p in parameters
        ]
        floats = [p.requires_grad_() for p in made if p.is_floating_point()]
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ eye
            results = fn(h.float() if cast else h, *made)
        results = results if isinstance(results, tuple) else (results,)
        pairs = zip(cotangents, results, strict=True)
        outward = [torch.as_tensor(c).to(y.dtype) for c, y in pairs]
        gradients = torch.autograd.grad(
            results, [x, *floats], outward, allow_unused=True, materialize_grads=True
        )
        return [_numpy(y) for y in results], [_numpy(g) for g in gradients]

    return run

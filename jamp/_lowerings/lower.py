"""The hook between a plan and JAX: what is bound on a backend and a processor."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Primitive

from jamp import _dtypes, _primitives
from jamp._dtypes import FLOAT16, DType
from jamp._errors import JampWarning
from jamp._tracing.origin import users_level

_CPU_INFO = Path("/proc/cpuinfo")
# Instructions that multiply bfloat16: of x86 processors, and of ARM's.
_MULTIPLIES = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def multiplies_bfloat16(cpu_info: str | None = None) -> bool | None:
    """Whether a processor, by default this one, can; None if it is not known."""
    if cpu_info is None:
        cpu_info = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpu_info, re.MULTILINE)
    return None if flags is None else not _MULTIPLIES.isdisjoint(flags[1].split())


@cache
def warn_if_slow(dtype: DType) -> None:
    """Warns, once, if JAX computes on a processor where a dtype only costs time."""
    if jax.default_backend() == "cpu" and multiplies_bfloat16() is False:
        what = "16-bit products" if dtype == FLOAT16 else "bfloat16"
        warnings.warn(
            f"this processor has no instructions for {what} (AVX512-BF16 or AMX): "
            "autocast saves no time on it. jamp.autocast(fn, enabled=False) runs fn as "
            "written",
            JampWarning,
            stacklevel=users_level(),
        )


class Lowering(NamedTuple):
    primitive: Primitive
    params: dict[str, Any]


def lowering(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """The primitive to bind for an equation of operands in other dtypes than traced.

    Its results have the dtypes that the plan gives them. It is for the device type, and
    for the processor at hand.
    """
    lower = _LOWERINGS.get(eqn.primitive.name)
    return lower(eqn, avals, device_type) if lower else _with_params(eqn)


def _with_params(eqn: JaxprEqn, **params: Any) -> Lowering:
    return Lowering(eqn.primitive, {**eqn.params, **params})


def _lower_product(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    dtype = _dtypes.widest(aval.dtype for aval in avals[:2])
    params: dict[str, Any] = {"preferred_element_type": dtype}
    if dtype in _dtypes.LOW_DTYPES and eqn.params.get("precision") is not None:
        # A configured one is for float32; its transposes would take it again for None.
        params["precision"] = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
    slow = (
        dtype in _dtypes.LOW_DTYPES
        and device_type == "cpu" == jax.default_backend()
        and multiplies_bfloat16() is False
        # XLA would send float32 copies of sharded operands from device to device.
        and jax.device_count() == 1
    )
    if slow and eqn.primitive.name == "dot_general":
        # 16-bit operands and results, multiplied and summed in float32: the same
        # product, without a loop that takes its operands apart one by one.
        params["precision"] = jax.lax.DotAlgorithmPreset.F32_F32_F32
    return _with_params(eqn, **params)


def _lower_scatter(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """What is bound for a scatter: its program for one element is in other dtypes."""
    del device_type
    public = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    params = {name: eqn.params[name] for name in names}
    eqns = jax.make_jaxpr(partial(public, **params))(*avals).eqns
    (traced,) = (found for found in eqns if found.primitive is eqn.primitive)
    return Lowering(eqn.primitive, dict(traced.params))


_LOWERINGS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], str], Lowering]] = {
    **dict.fromkeys(_primitives.MATMULS, _lower_product),
    **dict.fromkeys(_primitives.SCATTERS, _lower_scatter),
}

"""What the processor at hand can do."""

import re
import warnings
from functools import cache
from pathlib import Path

import jax
import jaxlib

from jamp._dtypes import FLOAT16, DType
from jamp._errors import JampWarning
from jamp._tracing.origin import users_level

_CPU_INFO = Path("/proc/cpuinfo")
# Instructions that multiply bfloat16: those of x86 that XLA uses for matrix products,
# and ARM's.
_OF_X86 = {"avx512_bf16", "amx_bf16"}
_MULTIPLIES = {*_OF_X86, "bf16"}

# Whether XLA converts all of a stack of bfloat16 to put one more on it.
CONVERTS_STACKS = jaxlib.version.__version_info__ < (0, 11, 2)
# Whether XLA may write products of bfloat16 in it as fast as in float32.
ROUNDS_PRODUCTS = jaxlib.version.__version_info__ >= (0, 11)


@cache
def bfloat16_instructions(cpu_info: str | None = None) -> frozenset[str] | None:
    """Those of a processor, by default of this one; None if they are not known."""
    if cpu_info is None:
        cpu_info = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpu_info, re.MULTILINE)
    return None if flags is None else frozenset(flags[1].split()) & _MULTIPLIES


def multiplies_bfloat16() -> bool | None:
    """Whether this processor can; None if it is not known."""
    found = bfloat16_instructions()
    return None if found is None else bool(found)


def has_fast_products() -> bool:
    """Whether XLA multiplies bfloat16 matrices with instructions of this processor."""
    return not _OF_X86.isdisjoint(bfloat16_instructions() or ())


def has_amx() -> bool:
    return "amx_bf16" in (bfloat16_instructions() or ())


@cache
def warn_if_slow(dtype: DType) -> None:
    """Warns, once, if JAX computes on a processor where a dtype only costs time."""
    if jax.default_backend() != "cpu":
        return
    if dtype == FLOAT16 and has_fast_products():
        lacks = (
            "products of float16 in XLA: autocast saves no time with it. bfloat16 is "
            "the dtype for CPUs"
        )
    elif multiplies_bfloat16() is False:
        what = "16-bit products" if dtype == FLOAT16 else "bfloat16"
        lacks = (
            f"{what} (AVX512-BF16 or AMX): autocast saves no time on it. "
            "jamp.autocast(fn, enabled=False) runs fn as written"
        )
    else:
        return
    text = f"this processor has no instructions for {lacks}"
    warnings.warn(text, JampWarning, stacklevel=users_level())

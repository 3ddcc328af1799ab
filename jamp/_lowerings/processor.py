"""Whether 16 bits are slow on the processor at hand, and a warning if they are."""

import re
import warnings
from functools import cache
from pathlib import Path

import jax

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

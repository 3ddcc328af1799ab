"""What the processor at hand can do."""

import re
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import jax

from jamp._dtypes import FLOAT16, DType
from jamp._errors import JampWarning
from jamp._tracing.locations import users_level

_CPU_INFO = Path("/proc/cpuinfo")
# Instructions that multiply bfloat16: those of x86 that XLA uses for matrix products,
# and ARM's.
_OF_X86 = frozenset({"avx512_bf16", "amx_bf16"})
_OF_ARM = frozenset({"bf16"})


class Processor(NamedTuple):
    """A processor, as /proc/cpuinfo describes it.

    Attributes:
      features: what it can do, by the names of Linux; None if it is not known.
      of_x86: whether it is known to be one of x86.
      vendor: who made it, by its own name of itself.
    """

    features: frozenset[str] | None
    of_x86: bool
    vendor: str

    @classmethod
    def described(cls, cpu_info: str) -> Self:
        vendor, flags, features = (
            re.search(rf"^{field}\s*: (.*)$", cpu_info, re.MULTILINE)
            for field in ("vendor_id", "flags", "Features")
        )
        known = flags or features
        names = None if known is None else frozenset(known[1].split())
        return cls(names, bool(flags), vendor[1] if vendor else "")

    @property
    def instructions(self) -> frozenset[str]:
        """Those that multiply bfloat16."""
        return (self.features or frozenset()) & (_OF_X86 | _OF_ARM)

    @property
    def has_amx(self) -> bool:
        return "amx_bf16" in self.instructions

    @property
    def has_fast_products(self) -> bool:
        """Whether XLA multiplies bfloat16 matrices with its instructions."""
        return not _OF_X86.isdisjoint(self.instructions)

    @property
    def is_held_back(self) -> bool:
        """Whether its instructions are no faster than those of float32.

        So are those of AVX512 on Intel's processors with AMX, which have float16 too,
        where AMX itself can't be used: a virtual machine may hide it.
        """
        hidden = "avx512_fp16" in (self.features or ()) and not self.has_amx
        return hidden and self.has_fast_products and self.vendor == "GenuineIntel"

    @property
    def gains(self) -> bool | None:
        """Whether products of bfloat16 take less time than of float32.

        None if it is not known.
        """
        if self.features is None or not _OF_ARM.isdisjoint(self.features):
            return None
        return bool(self.instructions) and not self.is_held_back


@cache
def this_processor() -> Processor:
    """The processor that this runs on."""
    known = _CPU_INFO.exists()
    return Processor.described(_CPU_INFO.read_text(encoding="utf-8") if known else "")


@cache
def warn_if_slow(dtype: DType) -> None:
    """Warns, once, if JAX computes on a processor where a dtype only costs time."""
    if jax.default_backend() != "cpu":
        return
    processor = this_processor()
    if dtype == FLOAT16 and processor.has_fast_products:
        text = (
            "this processor multiplies float16 no faster than float32 in XLA: autocast "
            "saves no time with it. bfloat16 is the dtype for CPUs"
        )
    elif processor.gains is False:
        # Convolutions become products of patches on x86 alone.
        saved = "time in convolutions at most" if processor.of_x86 else "no time"
        text = (
            f"this processor {_slow_because(processor, dtype)}: autocast saves "
            f"{saved}. jamp.autocast(fn, enabled=False) runs fn as written"
        )
    else:
        return
    warnings.warn(text, JampWarning, stacklevel=users_level())


def _slow_because(processor: Processor, dtype: DType) -> str:
    if processor.is_held_back:
        return (
            "multiplies 16 bits no faster than float32 (AVX512-BF16; its AMX is hidden)"
        )
    if processor.of_x86:
        what = "16-bit products" if dtype == FLOAT16 else "bfloat16"
        return f"has no instructions for {what} (AVX512-BF16 or AMX)"
    if dtype == FLOAT16:
        return "multiplies float16 no faster than float32 in XLA"
    return "has no instructions for bfloat16 (BF16)"

"""Processors that jamp is told to be on, by what /proc/cpuinfo says of them."""

from contextlib import contextmanager

import pytest

from jamp._lowerings import processor

OLD = "model name\t: An x86\nflags\t\t: fpu sse2 avx2 avx512f\n\nprocessor: 1"
NEW = OLD.replace("avx512f", "avx512f avx512_bf16")
# What a virtual machine sees of a processor whose AMX it is not given.
HELD_BACK = "vendor_id\t: GenuineIntel\n" + NEW.replace("_bf16", "_bf16 avx512_fp16")
PROCESSORS = {
    "old": OLD,
    "avx512_bf16": NEW,
    "amx_bf16": NEW.replace("_bf16", "_bf16 amx_bf16"),
    "held back": HELD_BACK,
}


@contextmanager
def processor_with(described, folder):
    """Has jamp take the processor for another one.

    It is one of PROCESSORS, or described as /proc/cpuinfo does, in a file of a folder.
    """
    file = folder / "cpuinfo"
    file.write_text(PROCESSORS.get(described, described), encoding="utf-8")
    caches = processor.this_processor, processor.warn_if_slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "_CPU_INFO", file)
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()

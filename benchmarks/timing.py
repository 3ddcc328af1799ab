"""Times of calls, in turn with others."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from operator import truediv
from typing import Any

import jax
from rich.progress import track

LEAST_SECONDS = 0.02  # for one reading of the clock


def medians_of_pairs(pairs: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Figures of seconds in float32 and under autocast, measured in turn."""
    plain, cast = zip(*pairs, strict=True)
    return {
        "float32_seconds": statistics.median(plain),
        "autocast_seconds": statistics.median(cast),
        "ratio": statistics.median(map(truediv, cast, plain)),
    }


def time_pairs(
    calls: Iterable[tuple[Callable[..., Any], Any]], pairs: int, what: str
) -> dict[str, float]:
    """Times programs of arguments in turn, after one pair that is not counted."""
    calls = list(calls)
    timed = [
        tuple(seconds_of_call(*call) for call in calls)
        for _ in track(range(pairs + 1), what)
    ]
    return medians_of_pairs(timed[1:])


def compare(
    programs: Iterable[Any], arguments: Any, pairs: int, what: str
) -> dict[str, float]:
    """Time and memory of a program compiled in float32 and under autocast."""
    plain, cast = programs
    calls = [(program, arguments) for program in (plain, cast)]
    memory = {
        "float32_temporary_bytes": plain.memory_analysis().temp_size_in_bytes,
        "autocast_temporary_bytes": cast.memory_analysis().temp_size_in_bytes,
    }
    return time_pairs(calls, pairs, what) | memory


def cells(figures: Mapping[str, Any]) -> list[str]:
    """These figures for a table: both times, the ratio, and that of the memory."""
    names = "float32", "autocast"
    plain, cast = (figures[f"{name}_temporary_bytes"] for name in names)
    times = [f"{figures[f'{name}_seconds'] * 1e3:.1f} ms" for name in names]
    return [*times, f"{figures['ratio']:.2f}", f"{cast / plain:.2f}" if plain else "-"]


def seconds_of_call(program: Callable[..., Any], arguments: Iterable[Any]) -> float:
    """Of one call, in so many that they can be timed."""
    calls, taken, start = 0, 0.0, time.perf_counter()
    while taken < LEAST_SECONDS:
        jax.block_until_ready(program(*arguments))
        taken = time.perf_counter() - start
        calls += 1
    return taken / calls


def threads() -> int:
    """How many threads XLA uses on the processor, which torch is to use as well."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""`jamp.explain`: what autocast did with a program, read from its decision records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jamp import _nnx, _regions, _trace
from jamp._emit import Scribe
from jamp._policy import Rule
from jamp._records import MATMULS, Record, flatten

_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "bool": "bool",
}


@dataclass(frozen=True)
class Report:
    """What runs in which dtype, and why.

    Attributes:
      records: one decision record per equation, those of inner programs included.
      header: a line on the device type, dtype and policy.
    """

    records: tuple[Record, ...]
    header: str

    @property
    def casts(self) -> int:
        """Number of conversions inserted."""
        return sum(len(record.casts) for record in self.records)

    @property
    def flops(self) -> float:
        """Floating-point operations of all matmuls and convolutions."""
        return sum(record.flops for record in self.records)

    @property
    def low_flop_share(self) -> float:
        """Share, from 0 to 1, of those operations that run on 16-bit operands."""
        total = self.flops
        low = sum(record.flops for record in self.records if record.low)
        return low / total if total else 0.0

    @property
    def unknown(self) -> tuple[Record, ...]:
        """Equations that ran as traced because the policy does not know them."""
        return tuple(r for r in self.records if "is unknown to" in r.ruling.source)

    def text(self, group: str = "function") -> str:
        """The report as text.

        Args:
          group: `'function'` for one line per listed function, module path and user
            line; `'equation'` for one line per equation.

        Raises:
          ValueError: another `group`.
        """
        if group not in ("function", "equation"):
            raise ValueError(f"group must be 'function' or 'equation', got {group!r}")
        rows = [_row(record) for record in self.records]
        if group == "function":
            rows = _grouped(self.records)
        head = ("operation", "computes in", "returns", "why", "where", "casts")
        return "\n".join(
            [self.header, *_totals(self), "", *_table([head, *rows]), *_unknown(self)]
        )

    def __str__(self) -> str:
        return self.text()


def explain(fn: Callable[..., Any], **autocast_options: Any) -> Callable[..., Report]:
    """Explains what `jamp.autocast` does with a function.

    Args:
      fn: the function, as given to `jamp.autocast`.
      **autocast_options: the options of `jamp.autocast`.

    Returns:
      A function of the same arguments that returns a `Report`. It traces `fn` and
      computes nothing.
    """
    autocast_options.pop("output_dtype", None)

    def explained(*args: Any, **kwargs: Any) -> Report:
        options = _regions.make_options(
            autocast_options.get("device_type"),
            autocast_options.get("dtype"),
            autocast_options.get("enabled", True),
            autocast_options.get("cache_enabled", True),
            autocast_options.get("policy"),
        )
        call = _nnx.prepare(fn, args, kwargs)
        traced = _trace.trace(call.fn, options, call.args, call.kwargs)
        scribe = Scribe()
        leaves = jax.tree.leaves((call.args, call.kwargs))
        jax.make_jaxpr(
            lambda *arrays: _trace.run(traced.program, arrays, options, scribe)
        )(*[leaf for leaf in leaves if _trace.is_array(leaf)])
        state = "" if options.enabled else ", disabled"
        header = (
            f"autocast on {options.device_type} to {options.dtype.name}{state}, "
            f"policy {options.policy.name}"
        )
        return Report(tuple(flatten(scribe.entries)), header)

    return explained


def _totals(report: Report) -> list[str]:
    records = report.records
    matmuls = [r for r in records if r.primitive in MATMULS]
    low = sum(r.low for r in matmuls)
    lines = [
        f"{len(records)} equations, {report.casts} casts inserted, "
        f"{low} of {len(matmuls)} matmuls and convolutions in 16 bits "
        f"({report.low_flop_share:.1%} of their FLOPs)"
    ]
    if matmuls and not low:
        reasons = ", ".join(sorted({r.ruling.source for r in matmuls}))
        lines.insert(0, f"NO MATMUL RUNS IN 16 BITS: {reasons}")
    return lines


def _unknown(report: Report) -> list[str]:
    names = Counter(record.primitive for record in report.unknown)
    if not names:
        return []
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
    return ["", f"ran as traced, because the policy does not know them: {listed}"]


def _row(record: Record) -> tuple[str, ...]:
    return (
        record.primitive,
        _dtypes(record.operands),
        _dtypes(record.results),
        _why(record),
        _where(record),
        _casts([record]),
    )


def _grouped(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """One row for the records of one function at one place, in program order."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        function = record.ruling.function
        name = function.name if function else record.primitive
        key = (name, _why(record), _where(record), "/".join(record.scope))
        groups.setdefault(key, []).append(record)
    return [
        (
            name
            if len(group) == 1 or group[0].ruling.function
            else f"{name} x{len(group)}",
            _dtypes(d for record in group for d in record.operands),
            _dtypes(group[-1].results),
            why,
            where,
            _casts(group),
        )
        for (name, why, where, _), group in groups.items()
    ]


def _dtypes(dtypes: Iterable[Any]) -> str:
    names = [getattr(d, "name", str(d)) for d in dtypes if d is not None]
    return "+".join(dict.fromkeys(_SHORT.get(name, name) for name in names)) or "-"


def _why(record: Record) -> str:
    rule, source = record.ruling.rule, record.ruling.source
    return f"{rule.value}: {source}" if rule is not Rule.AS_TRACED else source


def _where(record: Record) -> str:
    place = record.location
    scope = "/".join(record.scope)
    where = f"{Path(place.file).name}:{place.line}" if place else ""
    return " ".join(part for part in (scope, where) if part) or "-"


def _casts(records: Iterable[Record]) -> str:
    counts = Counter(
        f"{_SHORT.get(c.source.name, c.source.name)}->"
        f"{_SHORT.get(c.target.name, c.target.name)}"
        for record in records
        for c in record.casts
    )
    return ", ".join(f"{count} {cast}" for cast, count in sorted(counts.items()))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]

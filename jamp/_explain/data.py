"""A report as plain data."""

from collections import Counter
from typing import Any

from jamp._explain.figures import Figures
from jamp._explain.operations import Counted, Module, Operation
from jamp._explain.residuals import bytes_by_dtype
from jamp._tracing.regions import Options


def to_dict(report: Figures) -> dict[str, Any]:
    """The report as dicts, lists, strings and numbers; see `Report.to_dict`."""
    kept = report.residuals
    unknown = Counter(record.primitive for record in report.unknown)
    return {
        "function": report.name,
        **_options(report.options),
        "regions": list(map(_options, report.regions)),
        "attention": list(report.attention),
        "unknown": dict(sorted(unknown.items())),
        "unused_entries": [
            {**entry._asdict(), "rule": entry.rule.value} for entry in report.unused
        ],
        "figures": _figures(report),
        "residual_bytes": kept
        and {name: bytes_by_dtype(found) for name, found in kept._asdict().items()},
        "modules": _module(report.modules),
        "operations": [_operation(op) for op in report.operations],
    }


def _options(options: Options) -> dict[str, Any]:
    return {
        "device_type": options.device_type,
        "dtype": options.dtype.name,
        "policy": options.policy.name,
        "enabled": options.enabled,
    }


def _figures(counted: Counted) -> dict[str, Any]:
    return {
        "equations": len(counted.operations),
        "matmuls": len(counted.matmuls),
        "low_matmuls": counted.low_matmuls,
        "flops": counted.flops,
        "low_flop_share": counted.low_flop_share,
        "result_bytes": counted.result_bytes,
        "low_byte_share": counted.low_byte_share,
        "casts": counted.casts,
        "cast_bytes": counted.cast_bytes,
    }


def _module(module: Module) -> dict[str, Any]:
    return {
        "name": module.name,
        "figures": _figures(module),
        "modules": [_module(child) for child in module.children],
    }


def _operation(op: Operation) -> dict[str, Any]:
    record, location = op.record, op.location
    return {
        "primitive": record.primitive,
        "function": op.function,
        "rule": record.ruling.rule.value,
        "source": record.ruling.source,
        "scope": list(record.scope),
        "file": location.file if location else None,
        "line": location.line if location else None,
        "operands": [None if d is None else str(d) for d in record.operands],
        "results": [None if d is None else str(d) for d in record.results],
        "times": op.times,
        "flops": op.flops,
        "result_bytes": dict(op.result_bytes),
        "cast_bytes": op.cast_bytes,
        "casts": [
            {
                "from": cast.source.name,
                "to": cast.target.name,
                "shape": [n if isinstance(n, int) else str(n) for n in cast.shape],
            }
            for cast in record.casts
        ],
    }

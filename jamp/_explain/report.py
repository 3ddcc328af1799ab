"""`jamp.explain`: what autocast did with a program, read from its decision records."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Never, Self

import jax
from jax.extend.core import jaxpr_as_fun

from jamp._autocast import unwrapped
from jamp._compat import api_boundary
from jamp._emit import emit
from jamp._errors import AutocastError, AutocastTypeError
from jamp._explain import html, text
from jamp._explain.figures import Counted, Figures, Module, runs
from jamp._explain.operations import Operation, operations
from jamp._explain.residuals import Residuals, bytes_by_dtype, find_residuals
from jamp._explain.risks import find_risks
from jamp._plan.planner import make_plan
from jamp._tracing import trace
from jamp._tracing.checks import check_function, is_array
from jamp._tracing.options import Options
from jamp._tracing.regions import options_around, options_inside


@dataclass(frozen=True, repr=False, eq=False)
class Report(Figures):
    """What runs in which dtype, and why.

    `str` gives it as text, `rich.print` and notebooks show it in colour, and
    `save_html` makes a page of it. What is to be kept is `to_dict()`: a report cannot
    be pickled.

    Attributes:
      name: the function's name.
      options: the options of autocast, with the defaults filled in.
      regions: those of the enabled regions inside that have others.
      residuals: what the backward pass keeps, if `explain` was asked for it.
      risks: sentences on lines whose numbers 16 bits may not hold.
    """

    def text(self, group: str = "function") -> str:
        """The report as text.

        Args:
          group: `'function'` for one line per listed function, module path and user
            line; `'equation'` for one line per equation; `'module'` for the tree of
            modules with their figures. The first and the last leave out calls for which
            nothing was decided, and show modules that are alike once, with what only
            some of them hold marked so. Long names are cut.

        Raises:
          AutocastError: another `group`.
        """
        if group not in ("function", "equation", "module"):
            known = "'function', 'equation' or 'module'"
            raise AutocastError(f"group must be {known}, got {group!r}")
        return text.text(self, group)

    def to_dict(self) -> dict[str, Any]:
        """The report as data that `json.dumps` takes.

        Returns:
          A dict with the keys `function`, `device_type`, `dtype`, `policy` and
          `enabled`; `regions`, each with the last four; `warnings`, a
          list of sentences; `unknown`, the number of equations by primitive;
          `unused_entries`, each with `kind`, `name`, `rule` and `added`; `figures`:
          `equations`, `matmuls`, `low_matmuls`, `flops`, `low_flop_share`,
          `result_bytes` by dtype, `low_byte_share`, `casts` and `cast_bytes`;
          `residual_bytes`, by dtype under `autocast` and `as_written`, or None;
          `modules`, a tree of `name`, `names` (of modules that are alike, each),
          `figures` and `modules`; and `operations`, one dict per equation: `primitive`,
          `function`, `rule`, `source`, `note` (why there is float32 that the rule does
          not ask for, or None), `scope`, `file`, `line`, `library_file` and
          `library_line` (which that line led to), dtypes of `operands` and of
          `results`, `returns` (the dtypes in which these are handed on, rounded or
          not), `times` (how often it runs), `flops`, `result_bytes`, `cast_bytes`, and
          `casts`, each `from` a dtype `to` another, of a `shape`. Of the figures all
          but `equations` count each run of an equation.
        """
        kept = self.residuals
        unknown = Counter(record.primitive for record in self.unknown)
        return {
            "function": self.name,
            **_options(self.options),
            "regions": list(map(_options, self.regions)),
            "warnings": list(self.warnings),
            "unknown": dict(sorted(unknown.items())),
            "unused_entries": [
                {**entry._asdict(), "rule": entry.rule.value} for entry in self.unused
            ],
            "figures": _figures(self),
            "residual_bytes": kept
            and {name: bytes_by_dtype(found) for name, found in kept._asdict().items()},
            "modules": _module(self.modules),
            "operations": [_operation(op) for op in self.operations],
        }

    def to_html(self) -> str:
        """The report as one HTML page, which loads nothing."""
        return html.page(self)

    def save_html(self, path: str | Path) -> None:
        """Writes the report as one HTML page to a file, to open in a browser.

        Args:
          path: the file; one that is there is overwritten.
        """
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def __reduce__(self) -> Never:
        raise AutocastTypeError(
            "a report cannot be pickled: it holds the program's equations; keep "
            "report.to_dict(), which is data, or report.to_html()"
        )

    def __copy__(self) -> Self:
        return self  # it never changes

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Report of {self.name}: {self.header}>"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from jamp._explain.rich import renderables  # rich need not be installed

        return renderables(self)

    def _repr_html_(self) -> str:
        return html.frame(self)


def explain(
    fn: Callable[..., Any],
    *inputs: Never,
    residuals: bool = False,
    **autocast_options: Any,
) -> Callable[..., Report]:
    """Explains what `jamp.autocast` does with a function.

    Args:
      fn: the function, as given to `jamp.autocast`, or what that returned, whose own
        options hold. A function of which part is under autocast, as a training step,
        is explained as it runs if no options are given: the rest as written.
      residuals: whether to count too what the forward pass keeps for the backward pass
        if the floating results are differentiated with respect to the first argument
        that holds floating arrays. It takes two more traces.
      **autocast_options: the options of `jamp.autocast`.

    Returns:
      A function of the same arguments that returns a `Report`. It traces `fn` and
      computes nothing.

    Raises:
      AutocastError: a value that `jamp.autocast` would refuse, or another option than
        that of the function, which is under autocast itself.
      AutocastTypeError: an unknown option, or one of the wrong type, or `fn` is not
        callable.
      BannedOpError: the policy bans an operation of the program.
    """
    check_function("explain", fn, inputs)
    inner = unwrapped("explain", fn, autocast_options, ["residuals"])

    @api_boundary
    def explained(*args: Any, **kwargs: Any) -> Report:
        call = inner.prepare(args, kwargs)
        traced, options = _traced(call, inner.arguments.options(), inner.given)
        inside = options_inside(traced.program, options)
        enabled = [found for found in inside if found.enabled]
        decisive = enabled or [*inside]
        if not inner.given and options.enabled and len(decisive) == 1:
            (options,) = decisive
        # The arrays of each argument, in the order of the leaves of (args, kwargs).
        arguments = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
        arrays = [[*filter(is_array, jax.tree.leaves(a))] for a in arguments]

        plan = make_plan(traced.program, [*chain(*arrays)], options)
        kept = None
        if residuals:
            kept = Residuals(
                autocast=find_residuals(lambda *a: emit(plan, [*chain(*a)]), *arrays),
                as_written=find_residuals(
                    lambda *a: jaxpr_as_fun(traced.program)(*chain(*a)), *arrays
                ),
            )
        name = trace.name_of(fn) or type(fn).__name__
        others = tuple(found for found in enabled if found != options)
        found = tuple(operations(plan.records, options.policy))
        return Report(found, name, options, others, kept, find_risks(plan))

    return explained


def _traced(
    call: Any, options: Options, given: Mapping[str, Any] | None
) -> tuple[Any, Options]:
    """A call traced, and the options around it, which may be as it runs."""
    traced = trace.trace(call.fn, options, call.args, call.kwargs)
    outside = options
    if given is not None:
        outside = options_around("explain", given, options, traced.program)
    if outside is not options:
        traced = trace.trace(call.fn, outside, call.args, call.kwargs)
    return traced, outside


def _options(options: Options) -> dict[str, Any]:
    return {
        "device_type": options.device_type,
        "dtype": options.dtype.name,
        "policy": options.policy.name,
        "enabled": options.enabled,
    }


def _figures(counted: Counted) -> dict[str, Any]:
    counts = {"equations": len(counted.operations), "matmuls": runs(counted.matmuls)}
    names = "low_matmuls flops low_flop_share result_bytes low_byte_share casts"
    more = {name: getattr(counted, name) for name in (*names.split(), "cast_bytes")}
    return counts | more


def _module(module: Module) -> dict[str, Any]:
    return {
        "name": module.name,
        "names": list(module.names),
        "figures": _figures(module),
        "modules": [_module(child) for child in module.children],
    }


def _operation(op: Operation) -> dict[str, Any]:
    record, location, library = op.record, op.location, op.library
    return {
        "primitive": record.primitive,
        "function": op.function,
        "rule": record.ruling.rule.value,
        "source": record.ruling.source,
        "note": None if record.note is None else str(record.note),
        "scope": list(record.scope),
        "file": location.file if location else None,
        "line": location.line if location else None,
        "library_file": library.file if library else None,
        "library_line": library.line if library else None,
        "operands": [None if d is None else str(d) for d in record.operands],
        "results": [None if d is None else str(d) for d in record.results],
        "returns": [None if d is None else str(d) for d in record.returned],
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

"""Writes docs/ops.md: every op of torch's autocast lists, and what jamp does with it.

Run as `python docs/generate_ops.py`; with `--check` it compares the page with the file
instead and exits with 1 if they differ. All it says is read from the tables that the
tests hold jamp to, and from the decisions that jamp records while it rewrites each op.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import jax.numpy as jnp  # noqa: E402
import op_cases  # noqa: E402
from torch_parity import (  # noqa: E402
    DEVICES,
    OPS,
    differences,
    draw,
    measurements,
    reasons,
    shares,
    traced,
)

import jamp  # noqa: E402

PAGE = ROOT / "docs" / "ops.md"

SECTIONS = {
    "Matrix products": op_cases.matmul,
    "Convolutions": op_cases.convolution,
    "Elementwise functions": op_cases.pointwise,
    "Special functions": op_cases.special,
    "Reductions, norms and distances": op_cases.reductions,
    "Losses": op_cases.losses,
    "Linear algebra": op_cases.linalg,
    "Layers": op_cases.layers,
    "Indexing, joining and padding": op_cases.indexing,
    "Pooling, resizing and sampling": op_cases.images,
    "Signals and Fourier transforms": op_cases.signal,
}

# How the page calls rules.
_SAID = {"internal_float32": "internal float32", "as_traced": "as traced"}
# Before JAX 0.12 gave it a primitive of its own, jnp.log2 was written with log.
_OLDER = {"log2": "log"}

INTRODUCTION = """\
---
hide:
  - toc
---
<!-- Written by docs/generate_ops.py from the tables in tests/ and policies/. -->
# Ops

Every op that a list of `torch.amp` names, and others that were measured beside them:
what a JAX user writes for it, the dtype that torch 2.13 returns, and the rule by which
jamp comes to its own. Look an op up by its torch name.

*gpu* is CUDA with float16 in torch and `device_type="gpu"` in jamp; *cpu* has bfloat16.
`device_type="tpu"` has the rules of gpu and bfloat16. In both columns stands first the
dtype that torch returns:

- *16-bit* is the region's 16-bit dtype, whatever comes in, and *float32* is float32;
- *as input* is float32 for float32 inputs and 16-bit for 16-bit ones;
- *a / b* is *a* for float32 inputs and *b* for 16-bit ones, and several outputs are
  separated by commas. A dash stands for what was not measured.

Below it stand jamp's rule and the entry of the policy's table that it comes from, a
function or a primitive:

- *lower* casts to the region's 16-bit dtype, and *float32* to float32;
- *internal float32* computes in float32 and rounds once, to the dtype that came in;
- *promote* casts to the widest dtype that comes in, which is the rule of whatever moves
  data or works element by element;
- *as traced* leaves the dtypes as the program has them; *integers* are not cast.

A letter marks a row in which jamp returns another dtype than torch: the reason stands
under [Remaining differences](#remaining-differences).

jamp returns torch's dtype in {functions} of the cases measured for ops that JAX has a
function for, and in {all} of all cases, those composed by hand included.

Each row is held by `tests/dtypes/test_torch_parity.py`, dtypes and values:
`pytest tests/dtypes/test_torch_parity.py -k layers` runs those of one file of
`tests/op_cases`, and names each op that differs.

{sections}
"""


# The dtypes of torch.


def torch_dtypes(op: str, device: str) -> str:
    """What torch returns for an op, in words."""
    measured = OPS[op]["measured"][DEVICES[device][0]]
    single, low = measured["float32"], measured["low"]
    if single is None:
        return "-"
    if len(single) != len(low):
        return f"{_joined(single)} / {_joined(low)}"
    return ", ".join(
        dict.fromkeys(_pair(x, y) for x, y in zip(single, low, strict=True))
    )


def _joined(tokens: Sequence[str]) -> str:
    return ", ".join(_word(token) for token in tokens)


def _pair(single: str, low: str) -> str:
    if (single, low) == ("float32", "low"):
        return "as input"
    return _word(single) if single == low else f"{_word(single)} / {_word(low)}"


def _word(token: str) -> str:
    return "16-bit" if token == "low" else token


# The rules of jamp.


def deciding(records: Sequence[Any], dtypes: set[Any]) -> str:
    """The rule that settles the dtype of a program's results, with its table entry.

    Args:
      records: the decisions for the program, in its order, for float32 arguments.
      dtypes: the dtypes of its results.
    """
    inexact = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
    if not inexact:
        return "integers"
    low = {dtype for dtype in inexact if dtype.itemsize == 2}
    settled = {"lower": low, "float32": inexact - low}
    for record in reversed(records):
        if settled.get(record.ruling.rule.value, set()) & set(record.results):
            return _ruling(record)
    moving = any(record.ruling.rule.value == "promote" for record in records)
    # What is moved need not be what a function made as traced, as dropout's mask.
    others = {*settled, "as_traced"} if moving else settled
    handed_on = [
        record
        for record in reversed(records)
        if record.ruling.rule.value not in others
        and (record.ruling.function or record.ruling.rule.value == "internal_float32")
    ]
    # Of what hands on the dtype that came in, rounding says more than moving.
    handed_on.sort(key=lambda record: record.ruling.rule.value != "internal_float32")
    if handed_on:
        return _ruling(handed_on[0])
    return "promote" if moving else "as traced"


def _ruling(record: Any) -> str:
    rule, function = record.ruling.rule.value, record.ruling.function
    primitive = record.ruling.label
    entry = function.name if function else _OLDER.get(primitive, primitive)
    return f"{_SAID.get(rule, rule)}: `{entry}`"


def jamp_rule(case: op_cases.OpCase, device: str) -> str:
    """The rule by which jamp comes to the dtype of a case."""
    arguments = draw(case, jnp.float32)
    records = jamp.explain(case.fn, device_type=device)(*arguments).records
    results = traced(case.op, device, "float32").out_avals
    return deciding(records, {aval.dtype for aval in results})


# The page.


@cache
def letters() -> dict[str, str]:
    """A letter for each reason of a difference."""
    return {known.reason: chr(65 + i) for i, known in enumerate(differences())}


def _marks(op: str, device: str) -> str:
    found = [
        letters()[reason]
        for (name, at, _), reason in reasons().items()
        if (name, at) == (op, device)
    ]
    marks = [f"[{letter}](#remaining-differences)" for letter in dict.fromkeys(found)]
    return "".join(f" **{mark}**" for mark in marks)


def _row(case: op_cases.OpCase) -> str:
    cells = [f"`{case.op}`", _code(case.counterpart)]
    for device in DEVICES:
        rule = jamp_rule(case, device) + _marks(case.op, device)
        cells.append(f"{torch_dtypes(case.op, device)}<br>{rule}")
    return _line(cells)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _section(title: str, cases: Sequence[op_cases.OpCase]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield _line(("torch", "JAX", "gpu", "cpu"))
    yield _line(["---"] * 4)
    for case in cases:
        yield _row(case)


_KIND = {"float32": "float32 inputs", "low": "16-bit inputs"}


def _differences() -> Iterator[str]:
    yield "\n## Remaining differences\n"
    for known in differences():
        yield f"**{letters()[known.reason]}.** {known.reason}\n"
        groups: dict[tuple[str, str], list[str]] = {}
        for op, device, kind in known.keys:
            groups.setdefault((device, kind), []).append(op)
        for (device, kind), ops in groups.items():
            yield f"- {device}, {_KIND[kind]}: {', '.join(f'`{op}`' for op in ops)}"
        yield ""
    apart = dict.fromkeys(row.case.op for row in measurements() if not row.counted)
    yield (
        "Counted apart, because JAX has no complex32: for 16-bit inputs on gpu torch "
        "returns complex32 and jamp complex64 from "
        f"{', '.join(f'`{op}`' for op in apart)}."
    )


def _no_counterpart() -> Iterator[str]:
    yield "\n## Without a counterpart\n"
    yield _line(("torch", "torch, gpu", "torch, cpu", "why"))
    yield _line(["---"] * 4)
    for op, reason in op_cases.NO_COUNTERPART.items():
        yield _line(
            (f"`{op}`", *(torch_dtypes(op, device) for device in DEVICES), reason)
        )


def page() -> str:
    """The text of docs/ops.md."""
    of_all, of_functions = shares()
    titles = [*SECTIONS, "Remaining differences", "Without a counterpart"]
    links = (f"[{t}](#{t.lower().replace(',', '').replace(' ', '-')})" for t in titles)
    shares_ = {"all": of_all, "functions": of_functions}
    lines = [INTRODUCTION.format(**shares_, sections=" · ".join(links)).rstrip()]
    for title, module in SECTIONS.items():
        lines.extend(_section(title, module.CASES))
    lines.extend([*_differences(), *_no_counterpart()])
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, target: Path = PAGE) -> int:
    """Writes the page, or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args(arguments).check
    text = page()
    if check:
        current = target.read_text("utf-8") if target.exists() else ""
        if current != text:
            sys.stderr.write(f"{target} is stale: run python docs/generate_ops.py\n")
        return int(current != text)
    target.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

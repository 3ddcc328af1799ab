"""Writes docs/ecosystem.md from what benchmarks/ecosystem.py measured.

Run as `python docs/generate_ecosystem.py`. The numbers are those of the newest
`benchmarks/results/ecosystem-*.json`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ecosystem.md"

AREAS = {
    "networks": "Networks",
    "solvers": "Differential equations and solvers",
    "probability": "Probability",
    "agents": "Agents and games",
    "science": "Graphs, geometry and science",
}

INTRODUCTION = """\
<!-- Written by docs/generate_ecosystem.py from benchmarks/results/. -->
# Other libraries

Programs written with {count} packages that build on JAX, in small random
configurations, as written and under `jamp.autocast`: in bfloat16 by the policy for
CPUs, and in float16 by the policy for GPUs, trained with `jamp.dynamic_loss_scaling`.
All ran on a CPU, with JAX {jax} on Python {python}. `python benchmarks/ecosystem.py`
runs them anew.

**16 bits** is the share of the FLOPs of matrix products and convolutions that autocast
puts into 16 bits, under the CPU's policy. Of a training, the table shows the last loss
in float32, and how far those under autocast end from it, relative to what the training
in float32 gained: +1% means that a hundredth of the gain is missing. Of a computation,
it shows the largest difference of a number of the result, relative to the largest
number.
"""

# What is known of outcomes that are more than a tenth away from float32's.
FAR = 0.1
REMARKS = {
    "jaxopt_ridge": "an overflow of the scaled gradient is "
    "[hidden by the solver](sharp_bits.md#a-solver-can-hide-an-overflow), and the "
    "gradient zero; with `init_scale=2.0**8` it trains.",
    "flowjax_spline": "only its products are in bfloat16; other seeds were not tried.",
    "evosax_cma": "products of the covariance matrix are rounded to 8 bits, and each "
    "generation starts from the last; leave the strategy out of autocast.",
    "blackjax_window": "a chain that adapts its step size, after 40 steps: rounding "
    "takes it along another path.",
    "augmax_chain": "coordinates are rounded to 8 bits by a product; leave the "
    "augmentation out of autocast.",
}


def newest() -> dict[str, Any]:
    """The newest results."""
    found = (ROOT / "benchmarks" / "results").glob("ecosystem-*.json")
    path = max(found, key=lambda path: path.name)
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def page(content: dict[str, Any]) -> str:
    """The page's text."""
    figures, environment = content["figures"], content["environment"]
    introduction = INTRODUCTION.format(
        count=len({found["distribution"] for found in figures.values()}),
        jax=environment["versions"]["jax"],
        python=environment["python"],
    )
    lines = [introduction]
    for area, title in AREAS.items():
        chosen = [found for found in figures.values() if found["area"] == area]
        lines += [f"## {title}", "", *table(chosen), ""]
    sections = {
        "Far from float32": far,
        "What stays in float32, and why": stays,
        "What does not run": errors,
    }
    for title, section in sections.items():
        lines += [f"## {title}", "", *(list(section(figures)) or ["Nothing."]), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(programs: list[dict[str, Any]]) -> Iterator[str]:
    yield "| package | program | float32 | bfloat16 | float16 | 16 bits |"
    yield "|---|---|--:|--:|--:|--:|"
    for found in programs:
        share = found["bfloat16"].get("low_flop_share")
        matmuls = found["bfloat16"].get("matmuls")
        cells = (
            f"{found['distribution']} {found['version']}",
            found["what"].rstrip("."),
            f"{found['float32']['last']:.4g}" if "last" in found["float32"] else "",
            outcome(found["bfloat16"]),
            outcome(found["float16"]),
            f"{share:.0%}" if matmuls else "no products",
        )
        yield f"| {' | '.join(cells)} |"


def outcome(found: dict[str, Any]) -> str:
    if "error" in found:
        return "fails"
    return (
        f"{found['difference']:+.1%}"
        if "last" in found
        else (f"{found['difference']:.1e}")
    )


def name(found: dict[str, Any]) -> str:
    return f"{found['distribution']}, {found['what'][0].lower()}{found['what'][1:-1]}"


def far(figures: dict[str, Any]) -> Iterator[str]:
    for key, found in figures.items():
        away = [
            dtype
            for dtype in ("bfloat16", "float16")
            if not abs(found[dtype].get("difference", 0.0)) <= FAR
        ]
        if away:
            remark = REMARKS.get(key, "not looked into.")
            yield f"- {name(found)}, in {' and '.join(away)}: {remark}"


def stays(figures: dict[str, Any]) -> Iterator[str]:
    yield "Products by the entry of the policy that decided, and primitives that no"
    yield "policy lists, which run as traced."
    yield ""
    for found in figures.values():
        told = {dtype: reasons(found[dtype]) for dtype in ("bfloat16", "float16")}
        if told["bfloat16"] == told["float16"]:
            told = {"both": told["float16"]}
        for dtype, text in told.items():
            if text:
                yield f"- {name(found)}, in {dtype}: {text}"


def reasons(figures: dict[str, Any]) -> str:
    parts = [f"`{reason}`" for reason in figures.get("float32_flops", ())]
    if figures.get("unknown"):
        parts.append(f"not listed: {', '.join(figures['unknown'])}")
    return "; ".join(parts)


def errors(figures: dict[str, Any]) -> Iterator[str]:
    for found in figures.values():
        for dtype in ("float32", "bfloat16", "float16"):
            if "error" in found[dtype]:
                yield f"- {name(found)}, in {dtype}: `{found[dtype]['error']}`"


if __name__ == "__main__":
    PAGE.write_text(page(newest()), encoding="utf-8")

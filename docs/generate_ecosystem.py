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
    "plain": "Plain JAX and optax",
}

INTRODUCTION = """\
<!-- Written by docs/generate_ecosystem.py from benchmarks/results/. -->
# Other libraries

Programs written with {count} packages that build on JAX, and in plain JAX, in small
random configurations, as written and under `jamp.autocast`: in bfloat16 by the policy
for CPUs, and in float16 by the policy for GPUs, with `jamp.dynamic_loss_scaling`. All
ran on a CPU, with JAX {jax} on Python {python}. `python benchmarks/ecosystem.py` runs
them anew.

**16 bits** is the share of the FLOPs of matrix products and convolutions that autocast
puts into 16 bits, under the CPU's policy. Of a training, the table shows the last loss
in float32, and how far those under autocast end from it, relative to what the training
in float32 gained: +1% means that a hundredth of the gain is missing. Of a computation,
it shows the largest difference of a number of the result, relative to the largest
number. **Nudged** is how far float32 itself ends from there, at most, where what it
starts from (parameters, or arguments) is changed by as little as rounding to bfloat16
does, in five ways: differences below that say nothing of autocast. **Skipped** are
steps of a training in float16 that `jamp.dynamic_loss_scaling` left out, as the scale
began too large, at 65536.
"""

# What is known of outcomes that are further from float32's than this.
FAR = 0.01
SCALE = "with `jamp.GradScaler(init_scale=2.0**8)` none is skipped, and the difference"
COORDINATES = (
    "coordinates are rounded by a product, as by PyTorch's `affine_grid`; leave the "
    "augmentation out of autocast."
)
REMARKS = {
    ("flaxmodels_resnet", "bfloat16"): "noise; from three other starts it ends at "
    "-4.6%, -8.8% and +4.7%, and float32 itself, nudged, as far away.",
    ("jaxopt_ridge", "float16"): "an overflow of the scaled gradient is "
    "[hidden by the solver](sharp_bits.md#a-solver-can-hide-an-overflow), and the "
    "gradient zero; with `init_scale=2.0**8` it trains.",
    ("jaxopt_ridge", "bfloat16"): "+1.3% is the mean of five starts: the solver "
    "[gets no nearer than 16 bits "
    "allow](sharp_bits.md#a-solver-gets-no-nearer-than-16-bits-allow).",
    ("lineax_solve", "float16"): f"{SCALE} is +0.0%.",
    ("dynamax_hmm", "float16"): f"{SCALE} is +0.0%.",
    ("dynamax_kalman", "bfloat16"): "noise; five starts end between -1.7% and +1.0%.",
    ("dynamax_kalman", "float16"): f"{SCALE} is -0.3%.",
    ("gymnax_pendulum", "bfloat16"): "noise; five starts end between -3.1% and +3.5%.",
    ("augmax_chain", "bfloat16"): COORDINATES,
    ("augmax_chain", "float16"): COORDINATES,
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
        count=len({found["distribution"] for found in figures.values()} - {"jax"}),
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
    yield "| package | program | float32 | nudged | bfloat16 | float16 | 16 bits |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for found in programs:
        share = found["bfloat16"].get("low_flop_share")
        matmuls = found["bfloat16"].get("matmuls")
        cells = (
            f"{found['distribution']} {found['version']}",
            found["what"].rstrip("."),
            f"{found['float32']['last']:.4g}" if "last" in found["float32"] else "",
            shown(found, found["float32"].get("nudged")),
            outcome(found, "bfloat16"),
            outcome(found, "float16"),
            f"{share:.0%}" if matmuls else "no products",
        )
        yield f"| {' | '.join(cells)} |"


def shown(found: dict[str, Any], difference: float | None, sign: str = "") -> str:
    if difference is None:
        return ""
    if found["kind"] == "computation":
        return f"{difference:.1e}"
    return f"{difference:{sign}.1%}"


def outcome(found: dict[str, Any], dtype: str) -> str:
    if "error" in found[dtype]:
        return "fails"
    skipped = found[dtype].get("skipped")
    text = shown(found, found[dtype].get("difference"), "+")
    return f"{text}, {skipped} skipped" if skipped else text


def name(found: dict[str, Any]) -> str:
    what = found["what"].rstrip(".")
    first = what.split()[0]
    # Not ResNet, nor Stan's.
    if first == "A" or (first[1:].islower() and not first.endswith("'s")):
        what = what[0].lower() + what[1:]
    return f"{found['distribution']}, {what}"


def far(figures: dict[str, Any]) -> Iterator[str]:
    for key, found in figures.items():
        nudged = found["float32"].get("nudged", 0.0)
        for dtype in ("bfloat16", "float16"):
            away = abs(found[dtype].get("difference", 0.0))
            # A difference may be no number.
            if not away <= FAR:
                remark = f"nudged, float32 itself moves by {shown(found, nudged)}."
                if not away <= nudged:
                    remark = "not looked into."
                remark = REMARKS.get((key, dtype), remark)
                yield f"- {name(found)}, in {dtype}, {outcome(found, dtype)}: {remark}"


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

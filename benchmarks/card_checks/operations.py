"""Values and dtypes of the op cases of the tests, as run on the card."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from results_file import first_line

import jamp
from card_checks import Figures, Part, on_cpu

KINDS = ("float32", "low")
THREADS = 6
Errors = dict[str, Exception]

# Those that take as long to compile as all others together.
LONG = ("images", "indexing")


def part(kind: str, *, long: bool) -> Part:
    """The cases with arguments of one kind, group by group: the long ones or others."""

    def figures(size: str) -> Iterator[Figures]:
        from op_cases import GROUPS

        groups = [name for name in GROUPS if (name in LONG) == long]
        groups = groups[:1] if size == "tiny" else groups
        found: dict[str, Figures] = {}
        with ThreadPoolExecutor(THREADS) as pool:
            futures = {pool.submit(of_group, name, kind): name for name in groups}
            for future in as_completed(futures):
                error = future.exception()
                name = futures[future]
                found[name] = {"error": first_line(error)} if error else future.result()
                yield {"summary": summary(found), **total(found), "groups": found}

    return figures


LISTS = ("off", "other_dtypes", "errors", "other_products", "not_compared")
COUNTS = ("compared", "dtypes_agree", "dtypes_known_to_differ", "dtypes_measured")


def total(groups: dict[str, Figures]) -> Figures:
    """The counts of all groups."""
    fine = [found for found in groups.values() if "error" not in found]
    return {name: sum(found[name] for found in fine) for name in COUNTS}


def summary(groups: dict[str, Figures]) -> str:
    counts = total(groups)
    fine = [found for found in groups.values() if "error" not in found]
    lists = {name: sum(len(found[name]) for found in fine) for name in LISTS}
    failed = [f"{name}: {f['error']}" for name, f in groups.items() if "error" in f]
    return "; ".join(
        [
            f"{counts['compared']} compared, {lists['off']} off",
            f"{lists['errors']} raise",
            f"dtypes: {counts['dtypes_agree']} of {counts['dtypes_measured']} torch's, "
            f"{counts['dtypes_known_to_differ']} known to differ, "
            f"{lists['other_dtypes']} unexpected",
            *failed,
        ]
    )


def of_group(group: str, kind: str) -> Figures:
    """The figures of one group of cases."""
    from op_cases import GROUPS
    from torch_parity import BY_OP, arguments, references

    ops = [case.op for case in GROUPS[group]]
    with on_cpu():
        expected = references(group)
    inputs = {op: arguments(op, "gpu", kind) for op in ops}
    programs = {op: traced_highest(BY_OP[op].fn, inputs[op]) for op in ops}
    usual = {
        op: trace(BY_OP[op].fn, inputs[op]) for op in ops if products(programs[op])
    }
    # A precision at a call is not told from the same one in the configuration.
    other_products = [
        op for op in usual if products(usual[op]) != products(programs[op])
    ]
    programs |= {op: usual[op] for op in other_products}
    results, errors = run_all(programs, inputs)
    excesses = {
        op: excess(op, kind, programs[op], results[op], expected[op])
        for op in results
        if BY_OP[op].values
    }
    return {
        "compared": len(excesses),
        # The largest share of the tolerance that is taken, of a case that is not off.
        "largest": max((x for x in excesses.values() if x <= 1), default=None),
        "off": {
            op: {"autocast": ratio, "without_jamp": plain_excess(op, kind, expected)}
            for op, ratio in excesses.items()
            if not ratio <= 1
        },
        "errors": {op: describe(op, inputs[op], error) for op, error in errors.items()},
        "not_compared": [op for op in ops if not BY_OP[op].values],
        "other_products": other_products,
        **dtypes(results, kind),
    }


def trace(fn: Any, inputs: list[Any]) -> Any:
    return jax.make_jaxpr(jamp.autocast(fn, device_type="gpu"))(*inputs)


def traced_highest(fn: Any, inputs: list[Any]) -> Any:
    """The same, without TF32 in what stays in float32."""
    with jax.default_matmul_precision("highest"):
        return trace(fn, inputs)


def products(program: Any) -> list[Any]:
    """The dtypes of the operands and results of all products."""
    from jaxprs import equations

    return [
        (eqn.primitive.name, *(str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)))
        for eqn in equations(program.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def run_all(programs: Figures, inputs: Figures) -> tuple[Figures, Errors]:
    """The outputs of all that runs, from as few programs as can be, and the errors."""
    try:
        return run(programs, inputs), {}
    except Exception as error:  # noqa: BLE001 - the error is the figure
        if len(programs) == 1:
            return {}, dict.fromkeys(programs, error)
    results: Figures = {}
    errors: Errors = {}
    ops = list(programs)
    for half in (ops[: len(ops) // 2], ops[len(ops) // 2 :]):
        some = run_all({op: programs[op] for op in half}, inputs)
        results |= some[0]
        errors |= some[1]
    return results, errors


def run(programs: Figures, inputs: Figures) -> Figures:
    """The outputs of traced programs, from one program."""
    from jax.extend.core import jaxpr_as_fun

    def together(inputs: Figures) -> Figures:
        return {op: jaxpr_as_fun(programs[op])(*inputs[op]) for op in inputs}

    outputs = jax.jit(together)({op: inputs[op] for op in programs})
    return {op: [np.asarray(x) for x in found] for op, found in outputs.items()}


def excess(op: str, kind: str, program: Any, actual: Any, expected: Any) -> float:
    """The largest error of an op's outputs over what the tests allow; inf for a NaN."""
    from test_torch_parity import tolerance_of

    tolerance = tolerance_of(op, kind, np.float16, program)
    ratios = [0.0]
    for x, y in zip(actual, expected, strict=True):
        if x.shape != y.shape:
            ratios.append(np.inf)
        elif not np.issubdtype(y.dtype, np.inexact):
            ratios.append(0.0 if np.array_equal(x, y) else np.inf)
        elif y.size:
            scale = max(np.abs(y).max(), 1e-6)
            ratio = np.abs(x.astype(y.dtype) - y).max() / (tolerance * scale)
            ratios.append(float(np.nan_to_num(ratio, nan=np.inf)))
    return max(ratios)


def plain_excess(op: str, kind: str, expected: Figures) -> float:
    """The same of an op as JAX runs it, on float32 arguments."""
    from torch_parity import BY_OP, arguments

    inputs = arguments(op, "gpu", "float32")
    with jax.default_matmul_precision("highest"):
        program = jax.make_jaxpr(BY_OP[op].fn)(*inputs)
    return excess(op, kind, program, run({op: program}, {op: inputs})[op], expected[op])


def describe(op: str, inputs: list[Any], error: Exception) -> Figures:
    """An error, and what the case without jamp does."""
    from torch_parity import BY_OP

    try:
        jax.block_until_ready(jax.jit(BY_OP[op].fn)(*inputs))
    except Exception as plain:  # noqa: BLE001 - the error is the figure
        return {"error": first_line(error), "without_jamp": first_line(plain)}
    return {"error": first_line(error), "without_jamp": None}


def dtypes(results: Figures, kind: str) -> Figures:
    """How many outputs have the dtypes that torch returned on a GPU."""
    from torch_parity import BY_OP, measured, reasons

    torch = {op: measured(BY_OP[op], "gpu", kind) for op in results}
    found = {
        op: tuple("low" if x.dtype == np.float16 else str(x.dtype) for x in outputs)
        for op, outputs in results.items()
    }
    # JAX has no complex32.
    known = [op for op, dtypes in torch.items() if dtypes and "complex32" not in dtypes]
    differ = [op for op in known if found[op] != torch[op]]
    listed = [op for op in differ if (op, "gpu", kind) in reasons()]
    return {
        "dtypes_measured": len(known),
        "dtypes_agree": len(known) - len(differ),
        "dtypes_known_to_differ": len(listed),
        "other_dtypes": {
            op: {"torch": torch[op], "found": found[op]}
            for op in differ
            if op not in listed
        },
    }

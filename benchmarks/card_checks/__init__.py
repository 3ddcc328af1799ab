"""What `benchmarks/training.py` runs on a card; a part is a generator of its figures.

A part yields a dict of all that it has measured so far, with a `summary` of one line,
as often as there is more: what it has yielded is kept if it is stopped.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from results_file import first_line

Figures = dict[str, Any]
# From a size, `full` or `tiny`.
Part = Callable[[str], Iterator[Figures]]

ROOT = Path(__file__).parents[2]

for folder in ("examples", "tests", "tests/dtypes"):
    sys.path.append(str(ROOT / folder))


def attempt(fn: Callable[..., Figures], *args: Any) -> Figures:
    """What a function returns, or its error."""
    try:
        return fn(*args)
    except Exception as error:  # noqa: BLE001 - the error is the figure
        return {"error": first_line(error)}


def on_cpu() -> Any:
    """A context in which JAX computes on the CPU."""
    return jax.default_device(jax.devices("cpu")[0])


def relative_error(found: Any, expected: Any) -> float:
    """The norm of the difference of two trees of arrays, relative to that of one."""
    x, y = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])
        for leaves in (jax.tree.leaves(found), jax.tree.leaves(expected))
    )
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def load() -> dict[str, Part]:
    """All parts by name; those that take the longest come first."""
    from card_checks import operations, programs, scaling, scripts, training_runs

    return {
        **{
            f"{name}_{kind}": operations.part(kind, long=long)
            for kind in operations.KINDS
            for name, long in {"long_ops": True, "ops": False}.items()
        },
        **{f"run_{name}": training_runs.part(name) for name in training_runs.EXAMPLES},
        "scripts": scripts.part,
        "attention": programs.attention,
        "diagnose": programs.diagnose,
        "explain": programs.explain,
        "policy": programs.policy,
        "scaling": scaling.part,
    }

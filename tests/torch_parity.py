"""What torch returns for each op, what jamp returns, and which differences are known.

The tests of parity and the page docs/ops.md read the same tables through this module.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import flax.linen  # noqa: F401 - policies recognise functions of imported modules only
import jax
import jax.numpy as jnp
import numpy as np
import optax  # noqa: F401 - see above
from jax.extend.core import ClosedJaxpr
from op_cases import CASES, GROUPS, OpCase, draw

import jamp

DATA = Path(__file__).parent / "data"
OPS = {
    op["name"]: op
    for op in json.loads((DATA / "torch_op_table.json").read_text("utf-8"))["ops"]
}
BY_OP = {case.op: case for case in CASES}

# jamp's device types: what torch calls the device, and the 16-bit dtype measured there.
DEVICES = {"gpu": ("cuda", jnp.float16), "cpu": ("cpu", jnp.bfloat16)}
KINDS = ("float32", "low")

# Without the rounding that XLA would otherwise optimise away, and quick to compile.
COMPILER = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
}

# What a note of the table says of an op that JAX has no function for. The first three
# speak of one output of the op only.
_PARTIAL = ("info: no counterpart", "indices: no counterpart")
_COMPOSED = (
    "compose",
    "no fused op",
    "no direct counterpart",
    "no counterpart",
    "no optax function",
    "definition differs",
)


def dtype_of(kind: str, device: str) -> Any:
    """The dtype of the floating arguments."""
    return jnp.float32 if kind == "float32" else DEVICES[device][1]


def arguments(op: str, device: str, kind: str) -> list[jax.Array]:
    """The arguments of an op's case, on one of the devices, in one of the kinds."""
    return draw(BY_OP[op], dtype_of(kind, device))


@cache
def traced(op: str, device: str, kind: str) -> ClosedJaxpr:
    """An op's case under autocast."""
    fn = jamp.autocast(BY_OP[op].fn, device_type=device)
    return jax.make_jaxpr(fn)(*arguments(op, device, kind))


def computed(
    functions: dict[Any, Callable[..., Any]], arguments: dict[Any, list[jax.Array]]
) -> dict[Any, list[np.ndarray]]:
    """The outputs of functions, each of its own arguments, from one program."""

    def run(arguments: dict[Any, list[jax.Array]]) -> dict[Any, Any]:
        return {name: functions[name](*inputs) for name, inputs in arguments.items()}

    results = jax.jit(run, compiler_options=COMPILER)(arguments)
    return {
        name: [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
        for name, result in results.items()
    }


@cache
def references(group: str) -> dict[str, list[np.ndarray]]:
    """The outputs of a group's cases, computed in float64."""
    with jax.enable_x64(True):
        return computed(
            {case.op: case.fn for case in GROUPS[group]},
            {case.op: draw(case, np.float64) for case in GROUPS[group]},
        )


def is_composed(note: str) -> bool:
    """Whether a note says that JAX has no function for the op."""
    for partial in _PARTIAL:
        note = note.replace(partial, "")
    return any(phrase in note for phrase in _COMPOSED)


@dataclass(frozen=True)
class Measurement:
    """The dtypes that torch returned for an op.

    Attributes:
      case: the op's JAX counterpart.
      device: jamp's device type.
      kind: `float32` or `low`, the dtype of the floating inputs.
      torch: the dtypes, one per output of the case; `low` is the region's.
    """

    case: OpCase
    device: str
    kind: str
    torch: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What op_differences.toml knows it by."""
        return self.case.op, self.device, self.kind

    @property
    def name(self) -> str:
        """A test id."""
        return f"{self.case.op}-{self.device}-{self.kind}"

    @property
    def counted(self) -> bool:
        """Whether JAX has the dtypes; it has no complex32."""
        return "complex32" not in self.torch

    def jamp(self) -> tuple[str, ...]:
        """The dtypes that jamp returns."""
        low = DEVICES[self.device][1]
        return tuple(
            "low" if aval.dtype == low else str(aval.dtype)
            for aval in traced(self.case.op, self.device, self.kind).out_avals
        )


def measured(case: OpCase, device: str, kind: str) -> tuple[str, ...] | None:
    """What torch returned, one dtype per output, or None if that is not known."""
    tokens = OPS[case.op]["measured"][DEVICES[device][0]][kind]
    if tokens is None or "error" in tokens:
        return None
    # int64 is int32 where 64-bit types are off.
    tokens = ["int32" if token == "int64" else token for token in tokens]
    if len(tokens) > 1:
        return tuple(tokens[i] for i in case.index or range(len(tokens)))
    outputs = jax.eval_shape(case.fn, *draw(case, jnp.float32))
    return tuple(tokens) * len(jax.tree.leaves(outputs))


@cache
def measurements() -> tuple[Measurement, ...]:
    """Everything that was measured of ops that have a counterpart."""
    return tuple(_measurements())


def _measurements() -> Iterator[Measurement]:
    for case in CASES:
        for device in DEVICES:
            for kind in KINDS:
                tokens = measured(case, device, kind)
                if tokens is not None:
                    yield Measurement(case, device, kind, tokens)


@dataclass(frozen=True)
class Difference:
    """A reason, and the measurements that differ for it."""

    reason: str
    keys: tuple[tuple[str, str, str], ...]


def read_differences(text: str) -> tuple[Difference, ...]:
    """Reads op_differences.toml: groups of ops by reason, device type and kind."""
    found = []
    for entry in tomllib.loads(text)["differences"]:
        groups: dict[str, Any] = {k: v for k, v in entry.items() if k != "reason"}
        keys = [
            (op, device, kind)
            for device, kinds in groups.items()
            for kind, ops in kinds.items()
            for op in ops
        ]
        found.append(Difference(" ".join(entry["reason"].split()), tuple(keys)))
    return tuple(found)


@cache
def differences() -> tuple[Difference, ...]:
    """The differences that are known, with their reasons."""
    return read_differences((DATA / "op_differences.toml").read_text("utf-8"))


@cache
def reasons() -> dict[tuple[str, str, str], str]:
    """The reason for each measurement that differs."""
    return {key: known.reason for known in differences() for key in known.keys}


@dataclass(frozen=True)
class Share:
    """How many measurements agree."""

    agree: int
    total: int

    def __str__(self) -> str:
        return f"{self.agree} of {self.total} ({self.agree / self.total:.1%})"


def shares() -> tuple[Share, Share]:
    """How many measurements agree: of all ops, and of those JAX has a function for.

    A measurement agrees where no difference is listed: test_torch_parity.py holds each.
    """
    rows = [row for row in measurements() if row.counted]
    functions = [row for row in rows if not OPS[row.case.op]["composed"]]
    of_all, of_functions = (
        Share(sum(row.key not in reasons() for row in some), len(some))
        for some in (rows, functions)
    )
    return of_all, of_functions

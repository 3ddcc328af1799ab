"""The dtypes that torch returns for ops that no list of `torch.amp` names.

`python -m tests.op_cases.in_torch` measures them where torch 2.13 is installed, and
writes them into `torch_op_table.json`. For CUDA nothing is computed: torch follows the
dtypes of tensors that are on a GPU that need not be there.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from . import CASES, OpCase, draw

TABLE = Path(__file__).parents[1] / "data" / "torch_op_table.json"
LOW = {"cuda": torch.float16, "cpu": torch.bfloat16}
COMPOSED = "no direct counterpart (compose)"
# Those that a JAX user writes out of other functions.
BY_HAND = frozenset(
    """
    adaptive_avg_pool2d cumulative_trapezoid frac gaussian_nll_loss lerp
    multilabel_soft_margin_loss pairwise_distance pixel_shuffle tanhshrink threshold
    """.split()
)


def _named(op: str) -> Callable[..., Any]:
    room, _, name = op.partition("_")
    if room in ("fft", "linalg", "special"):
        return getattr(getattr(torch, room), name)
    return getattr(torch, op, None) or getattr(F, op)


# What is called with the arguments of an op's case: for those of `ALIKE` what torch has
# under their names.
CALLS: dict[str, Callable[..., Any]] = {
    "acosh": lambda x: torch.acosh(x + 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.movedim(-1, 1), 2),
    "amax": lambda x: torch.amax(x, -1),
    "amin": lambda x: torch.amin(x, -1),
    "argmax": lambda x: torch.argmax(x, -1),
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "constant_pad_nd": lambda x: F.pad(x, (2, 2)),
    "embedding": lambda table, tokens: F.embedding(tokens, table),
    "flip": lambda x: torch.flip(x, (1,)),
    "gather": lambda x, places: torch.gather(x, 1, places),
    "index_add": lambda x, rows, values: torch.index_add(x, 0, rows, values),
    "index_select": lambda x, rows: torch.index_select(x, 0, rows),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "matrix_power": lambda a: torch.linalg.matrix_power(a, 3),
    "max_pool1d": lambda x: F.max_pool1d(x.movedim(-1, 1), 2),
    "mean": lambda x: torch.mean(x, -1),
    "median": lambda x: torch.median(x, -1),
    "mvlgamma": lambda x: torch.mvlgamma(x + 1, 2),
    "nanmean": lambda x: torch.nanmean(x, -1),
    "nanmedian": lambda x: torch.nanmedian(x, -1),
    "nansum": lambda x: torch.nansum(x, -1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.movedim(-1, 1), 2),
    "polygamma": lambda x: torch.polygamma(1, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, 1),
    "roll": lambda x: torch.roll(x, 2, 1),
    "scatter_reduce": lambda x, rows, values: torch.scatter_reduce(
        x, 0, rows[:, None].expand(values.shape), values, "amax"
    ),
    "special_zeta": lambda x, q: torch.special.zeta(x + 2, q),
    "split": lambda x: torch.split(x, 4, 1),
    "std": lambda x: torch.std(x, -1),
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "tile": lambda x: torch.tile(x, (2, 1)),
    "topk": lambda x: torch.topk(x, 3),
    "var": lambda x: torch.var(x, -1),
    "where": lambda x, y: torch.where(x > 0, x, y),
}

ALIKE = """
abs argsort asinh atan atanh block_diag bucketize ceil copysign corrcoef cos cov
cumulative_trapezoid deg2rad diff digamma div erf erfc exp2 fft_fftshift floor
floor_divide fmax frac gaussian_nll_loss hardtanh heaviside hypot i0 inner kron
leaky_relu lgamma linalg_det linalg_lu linalg_norm linalg_slogdet logaddexp logaddexp2
logit matrix_exp maximum minimum mish mul multilabel_soft_margin_loss nan_to_num neg
outer pairwise_distance rad2deg relu6 remainder rot90 round sigmoid sign silu sin sinc
softsign sort special_entr special_gammainc special_gammaincc special_i0e special_i1
special_i1e special_log_ndtr special_ndtr special_ndtri special_xlog1py sqrt square sub
tanh tanhshrink trapezoid trunc xlogy
""".split()
CALLS |= {op: _named(op) for op in ALIKE}


def measure(case: OpCase) -> dict[str, dict[str, list[str] | None]]:
    """The dtypes of an op's outputs, by torch's device and the dtype of its inputs.

    None stands for what torch cannot tell without a GPU.
    """
    found: dict[str, dict[str, list[str] | None]] = {}
    for device, low in LOW.items():
        kinds = {"float32": torch.float32, "low": low}
        dtypes = {kind: _dtypes(case, device, dtype) for kind, dtype in kinds.items()}
        found[device] = dict.fromkeys(kinds) if None in dtypes.values() else dtypes
    return found


def _dtypes(case: OpCase, device: str, dtype: torch.dtype) -> list[str] | None:
    on_gpu = device == "cuda"
    with FakeTensorMode() if on_gpu else nullcontext(), _autocast(device):
        arguments = []
        for array in draw(case, jnp.float32):
            of = dtype if jnp.issubdtype(array.dtype, jnp.floating) else torch.int64
            if on_gpu:
                arguments.append(torch.empty(array.shape, dtype=of, device=device))
            else:
                arguments.append(torch.tensor(array.tolist()).to(of))
        try:
            outputs = pytree.tree_leaves(CALLS[case.op](*arguments))
        except (DataDependentOutputException, RuntimeError) as error:
            needs_gpu = isinstance(error, DataDependentOutputException)
            return None if needs_gpu or "not linked" in str(error) else ["error"]
    names = [str(output.dtype).removeprefix("torch.") for output in outputs]
    low = str(LOW[device]).removeprefix("torch.")
    tokens = ["low" if name == low else name for name in names]
    return tokens[:1] if len(set(tokens)) == 1 else tokens


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    """torch.autocast, which turns itself off for a GPU that is not there."""
    torch.set_autocast_dtype(device, LOW[device])
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def main() -> None:
    """Writes what torch returns into the table."""
    table = json.loads(TABLE.read_text("utf-8"))
    ops = {op["name"]: op for op in table["ops"]}
    for case in CASES:
        if case.op in CALLS:
            note = COMPOSED if case.op in BY_HAND else ""
            ops[case.op] = {
                "name": case.op,
                "cuda": "unlisted",
                "cpu": "unlisted",
                "measured": measure(case),
                "removed": False,
                "jax": case.counterpart,
                "note": note,
                "composed": bool(note),
            }
    head = {key: value for key, value in table.items() if key != "ops"}
    lines = ",\n".join(f"  {json.dumps(op)}" for op in ops.values())
    start = json.dumps(head, indent=1).removesuffix("\n}")
    TABLE.write_text(f'{start},\n "ops": [\n{lines}\n ]\n}}\n', "utf-8")


if __name__ == "__main__":
    main()

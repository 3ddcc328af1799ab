"""Programs whose numbers or texts a card is to show: attention, a model, reports."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rivals import LOW

import jamp
from card_checks import ROOT, Figures, attempt, on_cpu, relative_error

CUDNN_CALL = re.compile(r"__cudnn\$\w+")
# Both dtypes hold these numbers and the gradients, so scaled.
LOSS_SCALE = 2.0**10
FAULTS = ("sum_of_squares", "flax_block")  # of tests/faults


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in float64, on the CPU."""
    with jax.enable_x64(True), on_cpu():
        wide = jax.tree.map(as_float64, args)
        return jax.device_get(jax.jit(fn)(*wide))


def as_float64(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


# Attention.


def by_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, dtype: str | None = None
) -> jax.Array:
    """As docs/performance.md has it; by hand if it is told a dtype."""
    low = dtype or jamp.get_autocast_dtype()
    q, k, v = (x.astype(low) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


by_xla = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a weighted sum of the outputs, and the outputs."""

    def weighted(q: Any, k: Any, v: Any, weights: Any) -> Any:
        out = attend(q, k, v)
        return jnp.sum(out.astype(weights.dtype) * weights), out

    return jax.grad(weighted, argnums=(0, 1, 2), has_aux=True)


def attention(size: str) -> Iterator[Figures]:
    """Attention through cuDNN, forward and backward, beside float64."""
    shape = (1, 64, 2, 64) if size == "tiny" else (4, 512, 8, 64)
    rng = np.random.default_rng(0)
    arrays = [
        np.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(np.float32)
        for _ in range(4)
    ]
    expected = in_float64(with_gradients(by_xla), *arrays)
    found: Figures = {}
    for dtype in LOW:
        cast = partial(jamp.autocast, device_type="gpu", dtype=dtype)
        rivals = {
            "cudnn": cast(by_cudnn),
            "cudnn by hand": partial(by_cudnn, dtype=dtype),
            "xla": cast(by_xla),
        }
        for name, attend in rivals.items():
            found[f"{name}, {dtype}"] = attempt(attended, attend, arrays, expected)
            yield {"summary": attention_summary(found), "attention": found}


def attended(attend: Callable[..., Any], arrays: list[Any], expected: Any) -> Figures:
    program = jax.jit(with_gradients(attend)).lower(*arrays).compile()
    grads, out = program(*arrays)
    return {
        "output_dtype": str(out.dtype),
        "errors": {
            "output": relative_error(out, expected[1]),
            **{
                f"d{name}": relative_error(grad, wanted)
                for name, grad, wanted in zip("qkv", grads, expected[0], strict=True)
            },
        },
        "cudnn_calls": sorted(set(CUDNN_CALL.findall(program.as_text()))),
    }


def attention_summary(found: Figures) -> str:
    parts = []
    for name, figures in found.items():
        if "error" in figures:
            parts.append(f"{name}: {figures['error'][:60]}")
        else:
            worst, calls = max(figures["errors"].values()), figures["cudnn_calls"]
            parts.append(f"{name}: {worst:.1e}, {len(calls)} kinds of cuDNN calls")
    return "; ".join(parts)


# A model under the policy and by hand.


class Small(nn.Module):
    """Reads int32[batch, length]; one layer of each kind; a dtype where by hand."""

    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 64, dtype=self.dtype)(tokens)
        x = nn.gelu(nn.Conv(128, (3,), dtype=self.dtype)(x))
        x = nn.LayerNorm(dtype=self.dtype)(x)
        weights = nn.softmax(nn.Dense(4, dtype=self.dtype)(x), axis=1)
        x = jnp.einsum("blf,blh->bfh", x, weights).reshape(x.shape[0], -1)
        return nn.Dense(16, dtype=self.dtype)(x)


def loss_of(model: Small, params: Any, tokens: Any, labels: Any) -> jax.Array:
    logits = model.apply(params, tokens)
    if logits.dtype.itemsize == 2:
        logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def small_problem() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(64, size=(16, 32)).astype(np.int32)
    labels = rng.integers(16, size=16).astype(np.int32)
    params = jax.jit(Small().init)(jax.random.key(0), tokens)
    return params, tokens, labels


def policy(size: str) -> Iterator[Figures]:
    """The loss and gradients of a model under autocast and by hand, beside float64."""
    del size
    args = small_problem()
    expected = scaled_gradients(partial(loss_of, Small()), in_float64, *args)
    plain = partial(loss_of, Small())
    rivals = {"float32": plain}
    for dtype in LOW:
        rivals[f"autocast {dtype}"] = jamp.autocast(
            plain, device_type="gpu", dtype=dtype
        )
        rivals[f"by hand {dtype}"] = partial(loss_of, Small(jnp.dtype(dtype)))
    found: Figures = {}
    for name, loss in rivals.items():
        found[name] = attempt(beside, loss, args, expected)
        errors = [
            f"{key}: {f['gradient']:.1e}" if "gradient" in f else f"{key}: {f['error']}"
            for key, f in found.items()
        ]
        yield {"summary": f"gradients off by: {'; '.join(errors)}", "errors": found}


def scaled_gradients(
    loss: Callable[..., Any], call: Callable[..., Any], *args: Any
) -> tuple[Any, Any]:
    """The loss and the gradients of the parameters, from a scaled loss."""

    def scaled(*args: Any) -> Any:
        value = loss(*args)
        return value * LOSS_SCALE, value

    grads, value = call(jax.grad(scaled, has_aux=True), *args)
    return value, jax.tree.map(lambda grad: np.float64(grad) / LOSS_SCALE, grads)


def beside(loss: Callable[..., Any], args: Any, expected: Any) -> Figures:
    found = scaled_gradients(loss, lambda fn, *args: jax.jit(fn)(*args), *args)
    # Beside the whole gradient: in front of a softmax over its rows a bias has none.
    whole = np.linalg.norm([np.linalg.norm(x) for x in jax.tree.leaves(expected[1])])
    by_leaf = jax.tree.map(
        lambda x, y: float(np.linalg.norm(x - y) / whole), found[1], expected[1]
    )
    return {
        "loss": relative_error(found[0], expected[0]),
        "gradient": relative_error(found[1], expected[1]),
        "gradients": {
            jax.tree_util.keystr(path): error
            for path, error in jax.tree_util.tree_leaves_with_path(by_leaf)
        },
    }


# Reports.


def diagnose(size: str) -> Iterator[Figures]:
    """Whether a diagnosis names the line of a planted overflow."""
    import faults

    found: Figures = {}
    for name in FAULTS[: 1 if size == "tiny" else None]:
        diagnosis = faults.diagnosis_of(faults.load(name))
        lines = {(f.location.file, f.location.line) for f in diagnosis.findings}
        named = lines == {(faults.path_of(name), faults.marked_line(name))}
        found[name] = {"named": named, "text": str(diagnosis).splitlines()}
        said = (f"{name}: {f['named']}" for name, f in found.items())
        yield {"summary": f"the planted line alone, {', '.join(said)}", **found}


def explain(size: str) -> Iterator[Figures]:
    """What reports say here of a model and of the machine."""
    del size
    report = jamp.explain(partial(loss_of, Small()))(*small_problem())
    info = subprocess.run(
        [sys.executable, "-m", "jamp", "info"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = info.stdout + info.stderr
    yield {
        "summary": f"{report.low_flop_share:.0%} of FLOPs in 16 bits; "
        f"info: exit {info.returncode}",
        "explain": str(report).splitlines(),
        "info": said.splitlines(),
    }

"""Rules, and the names that a policy may use: below policies and what reads them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jamp._compat import primitive_names
from jamp._dtypes import DType
from jamp._errors import PolicyError, did_you_mean

BUILTIN = ("gpu", "cpu", "tpu")
# The built-in policy of each device type.
DEVICES = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "cpu": "cpu", "tpu": "tpu"}


class Rule(enum.Enum):
    """What a policy says of an operation; its value is the name that tables have."""

    LOWER = "lower"  # in 16 bits
    FLOAT32 = "float32"  # in float32, as its result
    INTERNAL_FLOAT32 = "internal_float32"  # in float32, its result as what comes in
    PROMOTE = "promote"  # in the widest dtype of what comes in
    AS_TRACED = "as_traced"  # in the dtypes of the program as written
    BANNED = "banned"  # not at all: it raises


RULE_NAMES = tuple(rule.value for rule in Rule)

# Where torch has a name, what a policy has.
_RULES_IN_TORCH = {
    **dict.fromkeys(
        "bfloat16 bf16 float16 fp16 half lower_precision_fp".split(), "lower"
    ),
    **dict.fromkeys("float fp32".split(), "float32"),
    "widest": "promote",
}
_IN_TORCH = {
    **dict.fromkeys("addmm baddbmm bmm einsum linear matmul mm".split(), "dot_general"),
    **dict.fromkeys("conv1d conv2d conv3d".split(), "conv_general_dilated"),
    "cross_entropy": "optax.losses.softmax_cross_entropy",
    "gelu": "jax.nn.gelu",
    "group_norm": "flax.linen.GroupNorm",
    "layer_norm": "flax.linen.LayerNorm",
    "log_softmax": "jax.nn.log_softmax",
    "mean": "jax.numpy.mean",
    "norm": "jax.numpy.linalg.norm",
    "prod": "reduce_prod",
    "relu": "jax.nn.relu",
    "rms_norm": "flax.linen.RMSNorm",
    "sigmoid": "logistic",
    "silu": "jax.nn.silu",
    "softmax": "jax.nn.softmax",
    "softplus": "jax.nn.softplus",
    "sum": "reduce_sum",
}

# `c / x` has no primitive of its own; torch routes it through reciprocal.
RECIPROCAL = "reciprocal"


@dataclass(frozen=True)
class Unsafe:
    """Primitives that must not read a rounded result of certain others."""

    primitives: tuple[str, ...]  # names of the reading primitives, such as `log`
    # Names of primitives and functions whose result is a probability.
    of: tuple[str, ...]
    dtype: DType  # the dtype whose rounding makes the reading unsafe
    advice: str  # what to write instead


def to_rule(name: str) -> Rule:
    """The rule of this name, or a PolicyError that lists the names there are."""
    if name not in RULE_NAMES:
        hint = _instead(name, _RULES_IN_TORCH) or did_you_mean(name, RULE_NAMES)
        raise PolicyError(
            f"unknown rule {name!r}{hint} (rules are {', '.join(RULE_NAMES)})"
        )
    return Rule(name)


# A name once found stays known: looking through all of JAX's for each would take longer
# than the rest of making a policy.
_known = {RECIPROCAL}


def check_primitive(name: str) -> str:
    """The name, if a policy may list it as a primitive."""
    if name not in _known:
        _known.update(primitive_names())
    if name not in _known:
        hint = _instead(name, _IN_TORCH) or did_you_mean(name, _known)
        raise PolicyError(f"unknown primitive {name!r}{hint}")
    return name


def _instead(name: Any, names: Mapping[str, str]) -> str:
    known = isinstance(name, str) and name in names
    return f"; did you mean {names[name]!r}?" if known else ""

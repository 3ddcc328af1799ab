"""Rules, and the names that a policy may use: below policies and what reads them."""

import enum
from dataclasses import dataclass

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
        hint = did_you_mean(name, RULE_NAMES)
        raise PolicyError(
            f"unknown rule {name!r}{hint} (rules are {', '.join(RULE_NAMES)})"
        )
    return Rule(name)


def check_primitive(name: str) -> str:
    """The name, if a policy may list it as a primitive."""
    known = primitive_names() | {RECIPROCAL}
    if name not in known:
        raise PolicyError(f"unknown primitive {name!r}{did_you_mean(name, known)}")
    return name

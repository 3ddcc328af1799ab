"""The options of an autocast: what may be given, and what is in force while tracing.

While a program is traced, the options in force live in a context that jit keys its
caches on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np

from jamp import _dtypes
from jamp._dtypes import DType
from jamp._errors import AutocastError, AutocastTypeError, did_you_mean
from jamp._policy.policy import Policy
from jamp._policy.rules import DEVICES


@dataclass(frozen=True)
class Options:
    policy: Policy
    dtype: DType
    device_type: str
    enabled: bool = True
    cache_enabled: bool = True
    source: str = "region with enabled=False"  # of a disabled one, for people to read
    # Whether they are those of a function that nothing is around.
    outermost: bool = field(default=False, compare=False)

    @property
    def run_as_written(self) -> bool:
        """Whether they are those of a function that runs without being traced."""
        return self.outermost and not self.enabled


# Device types of torch's for which there is no policy.
_OF_TORCH = frozenset("hpu ipu maia meta mps mtia privateuseone vulkan xla xpu".split())


def device_kind(device_type: Any) -> str:
    """The policy's name for a device type, or an error that lists the known ones."""
    if device_type is None:
        backend = jax.default_backend()
        if backend in DEVICES:
            return DEVICES[backend]
        raise AutocastError(
            f"JAX computes on {backend!r}, for which there is no policy: give the "
            f"device_type ({', '.join(DEVICES)}) whose rules and dtype are to hold"
        )
    if not isinstance(device_type, str):
        raise AutocastTypeError(
            f"device_type must be a str such as 'gpu', got {type(device_type).__name__}"
        )
    if device_type not in DEVICES:
        hint = "" if device_type in _OF_TORCH else did_you_mean(device_type, DEVICES)
        known = f"(known are {', '.join(DEVICES)})"
        raise AutocastError(f"unknown device_type {device_type!r}{hint} {known}")
    return DEVICES[device_type]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `jamp.autocast`, checked without asking JAX for its devices."""

    device_type: Any = None
    dtype: Any = None
    enabled: Any = True
    cache_enabled: Any = True
    policy: Any = None

    def __post_init__(self) -> None:
        if self.device_type is not None:
            device_kind(self.device_type)
        for name in ("enabled", "cache_enabled"):
            flag = getattr(self, name)
            if not isinstance(flag, bool | np.bool_):
                raise AutocastTypeError(f"{name} must be True or False, got {flag!r}")
        self._low_dtype()
        if self.policy is not None and not isinstance(self.policy, Policy):
            named = isinstance(self.policy, str)
            got = f"{self.policy!r}" if named else type(self.policy).__name__
            raise AutocastTypeError(
                "policy must be a jamp.Policy, as jamp.Policy.load("
                f"{got if named else '...'}) reads from a name or a file, got {got}"
            )

    def options(self) -> Options:
        """The options, with defaults of the place where they take effect."""
        policy, outer = self.policy, options_in_force()
        if policy is None and self.device_type is None and outer is not None:
            policy, kind = outer.policy, outer.device_type
        else:
            kind = device_kind(self.device_type)
            policy = policy or Policy.load(kind)
        dtype = self._low_dtype()
        if dtype is None:
            dtype = policy.dtype
        return Options(
            policy,
            dtype,
            kind,
            bool(self.enabled),
            bool(self.cache_enabled),
            outermost=outer is None,
        )

    def _low_dtype(self) -> DType | None:
        """The dtype to compute in; None is the policy's own."""
        if self.dtype is None:
            return None
        found = _dtype("dtype", self.dtype, _dtypes.LOW_NAMES, _LOW)
        if found in _dtypes.LOW_DTYPES:
            return found
        if found == _dtypes.FLOAT32 and not self.enabled:
            return None  # what a switch of dtypes says where nothing is to be 16-bit
        # Without x64 JAX takes float64 for float32; NumPy takes "f16" for 16 bytes.
        got = self.dtype if isinstance(self.dtype, str) else np.dtype(self.dtype)
        raise AutocastError(
            f"dtype must be {_dtypes.LOW_NAMES}, got {got}; leave it out for the "
            "policy's own, or use enabled=False to compute as written"
        )


_KNOWN = tuple(field.name for field in fields(Arguments))


def named_arguments(
    function: str, named: Mapping[str, Any], beside: Sequence[str]
) -> Arguments:
    """Arguments that a function takes by name beside others.

    A region has no `output_dtype`.
    """
    taken = {name: value for name, value in named.items() if name in _KNOWN}
    check_names(function, named.keys() - taken.keys() - {"output_dtype"}, beside)
    return Arguments(**taken)


def check_names(
    function: str, unknown: Iterable[str], beside: Sequence[str] = ()
) -> None:
    """Raises if there are options that a function, or autocast itself, does not take.

    Args:
      function: the function.
      unknown: the names of these options.
      beside: the names of what it takes and autocast does not.
    """
    names = sorted(unknown)
    if not names:
        return
    known = [*beside, *_KNOWN, "output_dtype"]
    of_autocast = function == "autocast"
    *takes, last = known if of_autocast else [*beside, "the options of jamp.autocast"]
    raise AutocastTypeError(
        f"{function} takes {', '.join(takes)} and {last}, not {', '.join(names)}"
        + did_you_mean(names[0], known)
    )


def refuse_overruled(
    function: str,
    given: Mapping[str, Any],
    options: Options,
    found: Collection[Options],
) -> None:
    """Raises for an option that holds nowhere in a function that is under autocast.

    Args:
      function: what the options were given to.
      given: those that were given, and are not None, by name.
      options: the options that they make.
      found: those of the functions under autocast that all operations stand in.
    """
    for name in sorted(given):
        asked = getattr(options, name)
        deciding = (own for own in found if own.enabled or name == "enabled")
        held = {getattr(own, name) for own in deciding}
        if held and asked not in held:
            decides = " and ".join(sorted(map(_shown, held)))
            if _shown(asked) == decides:
                decides = "another of that name"
            raise AutocastError(
                f"{function} was given {name}={_shown(asked)}, but the function is "
                f"under autocast itself, with {name}={decides}, which decides: leave "
                f"{name} out, or give {function} the function as it was before "
                "jamp.autocast"
            )


def _shown(option: Any) -> str:
    return str(getattr(option, "name", option))


# What PyTorch and its users call dtypes that jamp takes by another name.
_SHORT = {"half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_LOW = tuple(dtype.name for dtype in _dtypes.LOW_DTYPES)


def check_floating(name: str, dtype: Any) -> DType:
    """The dtype that an argument names, which has to be floating."""
    known = (*_LOW, "float32", "float64")
    found = _dtype(name, dtype, "a floating dtype", known)
    if not jax.dtypes.issubdtype(found, np.floating):
        raise AutocastTypeError(f"{name} must be a floating dtype, got {found}")
    return found


def checked_output_dtype(dtype: Any) -> DType | None:
    """The dtype that results are to have; None for that which they were computed in."""
    return None if dtype is None else check_floating("output_dtype", dtype)


def _dtype(name: str, value: Any, wanted: str, known: Sequence[str]) -> DType:
    try:
        found: DType = jax.dtypes.canonicalize_dtype(value)
    except (TypeError, ValueError):
        named = str(value).removeprefix("torch.")
        hint = did_you_mean(_SHORT.get(named, named), known)
        raise AutocastTypeError(
            f"{name} must be {wanted}, got {value!r}{hint}"
        ) from None
    return found


# Called with options, the context that puts them in force while a program is traced.
tracing = jax.make_user_context(None)


def options_in_force() -> Options | None:
    return tracing.value  # type: ignore[no-any-return]

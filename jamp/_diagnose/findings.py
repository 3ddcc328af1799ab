"""What `jamp.diagnose` found, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jamp._diagnose.measure import LOWEST_EXPONENT
from jamp._tracing.origin import Location

# Stands for an operation where an argument or a constant is at fault.
ARGUMENT = "argument"


@dataclass(frozen=True)
class Finding:
    """One operation in which something went wrong.

    Attributes:
      kind: `'overflow'` (not finite though float32 is), `'underflow'` (zero or nearly
        so), `'precision'` (too far from float32) or `'float32'` (not finite in float32
        either).
      operation: the primitive; `'argument'` for what the program is given.
      dtype: the dtype that it computed.
      location: the user's line.
      scope: the named scopes around it, such as the path of a module.
      gradient: whether it is part of the backward pass.
      iteration: of the loop that it stands in, where that is known.
      message: what happened, in words.
    """

    kind: str
    operation: str
    dtype: str
    location: Location | None
    scope: str
    gradient: bool
    iteration: int | None
    message: str

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}"
        if self.operation == ARGUMENT:
            return what
        nowhere = "the loss itself" if self.gradient else "unknown location"
        scope = f", in {self.scope}" if self.scope else ""
        return f"{what}\n    at {self.location or nowhere}{scope}"


@dataclass(frozen=True)
class Suggestion:
    """One change that cures what was found, or part of it.

    Attributes:
      code: what to write.
      reason: why, in words.
      cured: whether the program with all suggestions was run again and found healthy.
      options: what of it goes to `jamp.autocast`, as keyword arguments.
      loss_scale: the loss scale, where that is what to change.
    """

    code: str
    reason: str
    cured: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None

    def __str__(self) -> str:
        state = "ran again: healthy" if self.cured else "not verified"
        return f"{self.code}\n    {self.reason} ({state})"


@dataclass(frozen=True)
class Histogram:
    """How large the 16-bit values of a module are, in float32.

    Attributes:
      module: its path, or the function that the values are computed in.
      gradient: whether they are gradients of the scaled loss.
      counts: how many values have which exponent, beginning with 2^-64; larger and
        smaller ones count at the ends.
    """

    module: str
    gradient: bool
    counts: np.ndarray[Any, Any] = field(compare=False)

    @property
    def exponents(self) -> np.ndarray[Any, Any]:
        """The exponents that `counts` counts."""
        return np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + len(self.counts))


@dataclass(frozen=True)
class Underflow:
    """An operation that lost small numbers; often harmless.

    Attributes:
      operation: the primitive.
      location: the user's line.
      flushed: the share of its nonzero elements that became zero.
      subnormal: the share that is left with fewer digits than the dtype has.
    """

    operation: str
    location: Location | None
    flushed: float
    subnormal: float

    def __str__(self) -> str:
        return (
            f"{self.flushed:.1%} zero, {self.subnormal:.1%} subnormal: "
            f"{self.operation} at {self.location or 'unknown location'}"
        )

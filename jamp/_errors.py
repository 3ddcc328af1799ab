"""Every error and warning that jamp raises, so that callers can catch one base.

Its kernels raise Python's own for arrays that they do not take.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class JampError(Exception):
    """Base of all errors raised by jamp."""


class AutocastError(JampError, ValueError):
    """A wrong argument to `jamp.autocast`, or a region that cannot take effect."""


class AutocastTypeError(JampError, TypeError):
    """An argument of the wrong type, such as a non-callable to `jamp.autocast`."""


class PolicyError(JampError, ValueError):
    """A policy that names an unknown key, rule, primitive or function."""


class BannedOpError(JampError, RuntimeError):
    """The program holds an operation that its policy bans as unsafe."""


class ScalerError(JampError, ValueError):
    """A wrong argument to `jamp.GradScaler` or to what works with it."""


class ScalerTypeError(JampError, TypeError):
    """An argument of the wrong type where a loss or a loss scale is expected."""


class TargetError(JampError, ValueError):
    """A function or inputs, named on the command line, that cannot be used."""


class JampWarning(UserWarning):
    """A likely mistake, or a device on which autocast saves no time."""


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the nearest that is."""
    if not isinstance(name, str):
        return ""
    known = list(known)
    near = difflib.get_close_matches(name, known)
    near.sort(key=lambda other: sorted(other) != sorted(name))  # letters swapped
    near = [other for other in known if other.lower() == name.lower()] + near
    return f"; did you mean {near[0]!r}?" if near else ""


def described(value: Any) -> str:
    """A value that an argument has, in an error; of what is long its type alone."""
    shown = repr(value)
    short = len(shown) <= 60 and "\n" not in shown
    return shown if short else f"one of type {type(value).__name__}"

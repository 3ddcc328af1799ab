"""Which functions an operation stands in, and how code can name them."""

import sys
from itertools import takewhile
from types import CodeType

from jamp._compat import frames
from jamp._diagnose.measure import Measured
from jamp._policy.functions import Function
from jamp._tracing import trace
from jamp._tracing.locations import is_users

_TRACE = trace.trace.__code__.co_filename


def codes_around(output: Measured) -> tuple[list[CodeType], CodeType | None]:
    """Code of the functions around an output, innermost first, and of the outermost.

    What JAX traced on its own, such as a branch or what `jax.jit` holds, has frames up
    to there only; the callers have the others.
    """
    codes: list[CodeType] = []
    for eqn in output.eqns:
        found, _ = frames(eqn)
        codes += takewhile(lambda code: code.co_filename != _TRACE, found)
    users = [code for code in codes if is_users(code.co_filename)]
    if not users:
        return [], None
    return [code for code in codes if code is not users[-1]], users[-1]


def name_of(code: CodeType, diagnosed: CodeType | None) -> str | None:
    """The name of a function of the user's, or None where nothing can name it.

    It is the dotted one by which a policy finds it, or else what it is called where
    the diagnosed function is defined.
    """
    if diagnosed is None or not is_users(code.co_filename) or "<" in code.co_name:
        return None
    around, local, name = code.co_qualname.rpartition("<locals>.")
    path = _mangled(name).removesuffix(".__call__")
    if local:
        same = code.co_filename == diagnosed.co_filename
        seen = same and diagnosed.co_qualname.startswith(around + local)
        return path if seen else None
    for module, loaded in list(sys.modules.items()):
        if getattr(loaded, "__file__", None) != code.co_filename:
            continue
        if not leads_to(f"{module}.{path}", code):
            return None  # it is decorated, and the name that of what the decorator made
        return path if module == "__main__" else f"{module}.{path}"
    return path


def _mangled(path: str) -> str:
    """The path by which a method is found from outside of its class, where private."""
    owner, _, name = path.rpartition(".")
    if not owner or not name.startswith("__") or name.endswith("__"):
        return path
    return f"{owner}._{owner.rpartition('.')[2].lstrip('_')}{name}"


def leads_to(name: str, code: CodeType | None) -> bool:
    """Whether a policy finds a function by a dotted name."""
    return code is not None and Function(name, required=False).resolve() is code

"""Rules for equations that need more than a cast of their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jamp._rules.calls import run_jit
from jamp._rules.convert import run_convert
from jamp._rules.derivatives import run_custom_jvp
from jamp._values import Value

HANDLERS: Mapping[str, Callable[..., list[Value]]] = {
    "convert_element_type": run_convert,
    "custom_jvp_call": run_custom_jvp,
    "jit": run_jit,
}

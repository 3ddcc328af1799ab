"""Which implementation runs: the one asked for, or the fastest that was measured."""

import importlib
import json
import math
import re
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jax

from jamp.pallas_kernels.unscale import reference

# Each is the name of a module beside this one.
KERNELS = ("triton", "mosaic_gpu")
IMPLEMENTATIONS = ("auto", "xla", *KERNELS)
_TRITON_ENDS = "The Pallas Triton backend is deprecated"
_LOADING = threading.Lock()


def chosen(implementation: str) -> Any:
    """The module of an implementation by name; an error if it can't run here."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r}; known are "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "xla":
        return reference
    if reasons := why_not(implementation):
        raise NotImplementedError(
            f"implementation {implementation!r} can't run here: {'; '.join(reasons)}. "
            "'auto' and 'xla' run everywhere"
        )
    return load(implementation)


@cache
def load(implementation: str) -> Any:
    # Once: each change of the filters makes Python show the user's warnings again that
    # it shows once a line, and is every thread's.
    with _LOADING, warnings.catch_warnings():
        # JAX announces the end of its Triton backend at every import.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(f"jamp.pallas_kernels.unscale.{implementation}")


def ignore_the_end_of_triton() -> None:
    """Keeps quiet where it is compiled, if the user has not asked for it."""
    message = re.compile(_TRITON_ENDS, re.IGNORECASE)
    ignored = ("ignore", message, DeprecationWarning, None, 0)
    if warnings.filters[:1] != [ignored]:
        warnings.filterwarnings("ignore", _TRITON_ENDS, DeprecationWarning)


def why_not(implementation: str) -> list[str]:
    """Why a kernel can't run on the default device and this mesh; empty if it can."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    several = f"the mesh has axes of several types ({', '.join(map(str, kinds))})"
    reasons = [several] if len(set(kinds)) > 1 else []
    try:
        module = load(implementation)
    except ImportError as error:
        reasons.append(f"JAX {jax.__version__} lacks what it takes ({error})")
        module = None
    device = default_device()
    if device.platform != "gpu":
        reasons.append(f"it needs an NVIDIA GPU, and the default device is {device}")
        return reasons
    capability = getattr(device, "compute_capability", None)
    if capability is None or not str(capability)[0].isdigit():
        reasons.append(f"{device.device_kind} is not an NVIDIA GPU")
    elif module and float(capability) < module.MINIMUM_CAPABILITY:
        reasons.append(
            f"it needs compute capability {module.MINIMUM_CAPABILITY}, and "
            f"{device.device_kind} has {capability}"
        )
    return reasons


def default_device() -> jax.Device:
    chosen = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def fastest(leaves: list[Any]) -> Any:
    """The module that checks leaves of this size the fastest, of what was measured."""
    device = default_device()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # Of symbolic shapes it is not known.
    if device.platform != "gpu" or not isinstance(size, int):
        return reference
    best = nearest(measured()["fastest"].get(device.device_kind, ()), size)
    if best == "xla" or why_not(best):
        return reference
    ignore_the_end_of_triton()
    return load(best)


def nearest(table: Sequence[tuple[int, str]], size: int) -> str:
    """What stands beside the nearest size in bytes, by ratio; `'xla'` if none does."""
    rows = [(abs(math.log(max(1, size) / row)), best) for row, best in table]
    return min(rows)[1] if rows else "xla"


@cache
def measured() -> dict[str, Any]:
    text = files(__package__).joinpath("measured.json").read_text(encoding="utf-8")
    return dict(json.loads(text))

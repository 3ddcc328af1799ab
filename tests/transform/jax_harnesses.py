"""JAX's own cases of its primitives: those that compute in floating dtypes on a CPU."""

import functools
import zlib

import jax.numpy as jnp
import numpy as np

# The cases stand in no public module, and no other list is as complete.
from jax._src.internal_test_util import test_harnesses  # noqa: TID251

FLOAT32 = np.dtype(np.float32)
FLOATS = (FLOAT32, np.dtype(np.float16), np.dtype(jnp.bfloat16))


def _dtypes(harness):
    """Its own dtype and those of the arguments that are described by one."""
    described = [d.dtype for d in harness.arg_descriptors if hasattr(d, "dtype")]
    return tuple(np.dtype(dtype) for dtype in (harness.dtype, *described))


def _wanted(harness):
    # Without `enable_xla` a case is a twin: the same program, for JAX's converters.
    twin = not harness.params.get("enable_xla", True)
    floating = any(dtype in FLOATS for dtype in _dtypes(harness))
    return floating and not twin and harness.filter("cpu")


def _by_group():
    groups = {}
    for harness in filter(_wanted, test_harnesses.all_harnesses):
        groups.setdefault(harness.group_name, []).append(harness)
    return groups


# The cases of each group, which is a primitive as a rule.
HARNESSES = _by_group()

# The first case of each group for each combination of dtypes.
SAMPLE = {
    group: list({_dtypes(h): h for h in reversed(harnesses)}.values())
    for group, harnesses in HARNESSES.items()
}


@functools.cache
def arguments(harness):
    """Its arguments, the same at each call."""
    seed = zlib.crc32(harness.fullname.encode())
    made = harness.dyn_args_maker(np.random.RandomState(seed))
    return tuple(np.asarray(argument) for argument in made)


def is_refused(harness):
    """Whether plain JAX refuses to compute it."""
    try:
        harness.dyn_fun(*arguments(harness))
    except Exception:  # noqa: BLE001 - the refusals have no type in common
        return True
    return False

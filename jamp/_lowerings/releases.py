"""What XLA does on CPUs in some of the supported releases of JAX, and not in others."""

import jaxlib

_RELEASE = jaxlib.version.__version_info__

# Whether it moves bfloat16 as float32: all of a stack, to put one more on it.
MOVES_BFLOAT16_AS_FLOAT32 = _RELEASE < (0, 11, 2)
# Whether it may write products of bfloat16 in it as fast as in float32.
ROUNDS_PRODUCTS = _RELEASE >= (0, 11)
# Whether barriers are there until it has decided what to run first.
KEEPS_BARRIERS = _RELEASE >= (0, 11, 1)

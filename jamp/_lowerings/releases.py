"""What XLA does on CPUs in some of the supported releases of JAX, and not in others."""

import jaxlib

_RELEASE = jaxlib.version.__version_info__

# Whether XLA turns bfloat16 into float32 and back to move it. To write one slice of a
# stack it then converts the whole stack.
MOVES_BFLOAT16_AS_FLOAT32 = _RELEASE < (0, 11, 2)
# Whether a product that XLA writes in bfloat16 can be as fast as one that it writes in
# float32, to be rounded.
ROUNDS_PRODUCTS = _RELEASE >= (0, 11)
# Whether XLA keeps optimization barriers until it has put what it runs in order.
KEEPS_BARRIERS = _RELEASE >= (0, 11, 1)

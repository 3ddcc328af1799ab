"""Programs that go through every construct of JAX and of the libraries on it.

Each holds a matmul or a convolution in a place that a rewriting may fail to reach.
"""

from . import (
    derivatives,
    dtypes,
    linen,
    loops,
    nnx,
    opaque,
    other_libraries,
    references,
    remat,
    sharding,
    solvers,
)
from ._construct import Construct as Construct

CONSTRUCTS: tuple[Construct, ...] = (
    *loops.CONSTRUCTS,
    *derivatives.CONSTRUCTS,
    *solvers.CONSTRUCTS,
    *remat.CONSTRUCTS,
    *sharding.CONSTRUCTS,
    *opaque.CONSTRUCTS,
    *references.CONSTRUCTS,
    *dtypes.CONSTRUCTS,
    *linen.CONSTRUCTS,
    *nnx.CONSTRUCTS,
    *other_libraries.CONSTRUCTS,
)

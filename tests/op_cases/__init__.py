"""The JAX counterpart of every torch op that autocast is documented or measured for.

`CASES` holds the ops that have one, `GROUPS` the same by file; `NO_COUNTERPART` says
why the others have none. Together they name every op of `torch_op_table.json` once.
"""

from . import (
    convolution,
    images,
    indexing,
    layers,
    linalg,
    losses,
    matmul,
    pointwise,
    reductions,
    signal,
    special,
)
from ._case import DRAWS as DRAWS
from ._case import OpCase as OpCase
from ._case import Spec as Spec
from ._case import draw as draw

GROUPS: dict[str, tuple[OpCase, ...]] = {
    "matmul": matmul.CASES,
    "convolution": convolution.CASES,
    "pointwise": pointwise.CASES,
    "special": special.CASES,
    "reductions": reductions.CASES,
    "losses": losses.CASES,
    "linalg": linalg.CASES,
    "layers": layers.CASES,
    "indexing": indexing.CASES,
    "images": images.CASES,
    "signal": signal.CASES,
}
CASES: tuple[OpCase, ...] = tuple(case for group in GROUPS.values() for case in group)

NO_COUNTERPART: dict[str, str] = {
    "eig": "removed from torch 2.x; see linalg_eig",
    "lstsq": "removed from torch 2.x; see linalg_lstsq",
    "matrix_rank": "removed from torch 2.x; see linalg_matrix_rank",
    "solve": "removed from torch 2.x; see linalg_solve",
    "symeig": "removed from torch 2.x; see linalg_eigh",
    "fractional_max_pool2d": "no JAX function pools over random windows",
    "fractional_max_pool3d": "no JAX function pools over random windows",
    "_grid_sampler_2d_cpu_fallback": "internal name of grid_sampler_2d",
    "_scaled_dot_product_flash_attention": (
        "internal name of scaled_dot_product_attention"
    ),
    "_thnn_fused_gru_cell": "internal name of GRUCell",
    "_thnn_fused_lstm_cell": "internal name of LSTMCell",
    "cross_entropy_loss": "internal name of cross_entropy",
    "cudnn_convolution": "internal name of conv1d, conv2d and conv3d",
    "cudnn_convolution_transpose": (
        "internal name of conv_transpose1d, conv_transpose2d and conv_transpose3d"
    ),
    "multilabel_margin_loss_forward": "internal name of multilabel_margin_loss",
}

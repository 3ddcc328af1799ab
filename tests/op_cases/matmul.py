"""Products of matrices and vectors, and attention."""

import jax
import jax.numpy as jnp

from ._case import OpCase, normal, positive

_MATRICES = (normal(4, 6), normal(6, 5))
_BATCHES = (normal(3, 4, 6), normal(3, 6, 5))
_CHAIN = (normal(4, 6), normal(6, 5), normal(5, 7))
_HEADS = (normal(2, 6, 2, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8))

CASES = (
    OpCase("__matmul__", lambda x, y: x @ y, _MATRICES, "x @ y"),
    OpCase("matmul", jnp.matmul, _MATRICES, "jnp.matmul(x, y)"),
    OpCase("mm", jnp.dot, _MATRICES, "jnp.dot(x, y)"),
    OpCase("bmm", jnp.matmul, _BATCHES, "jnp.matmul(x, y)"),
    OpCase("mv", jnp.matmul, (normal(4, 6), normal(6)), "jnp.matmul(m, v)"),
    OpCase(
        "addmm",
        lambda c, a, b: c + a @ b,
        (normal(4, 5), *_MATRICES),
        "c + a @ b",
    ),
    OpCase(
        "addmv",
        lambda c, m, v: c + m @ v,
        (normal(4), normal(4, 6), normal(6)),
        "c + m @ v",
    ),
    OpCase(
        "addr",
        lambda c, u, v: c + jnp.outer(u, v),
        (normal(4, 5), normal(4), normal(5)),
        "c + jnp.outer(u, v)",
    ),
    OpCase(
        "addbmm",
        lambda c, a, b: c + jnp.einsum("bij,bjk->ik", a, b),
        (normal(4, 5), *_BATCHES),
        'c + jnp.einsum("bij,bjk->ik", a, b)',
    ),
    OpCase(
        "baddbmm",
        lambda c, a, b: c + jnp.matmul(a, b),
        (normal(3, 4, 5), *_BATCHES),
        "c + jnp.matmul(a, b)",
    ),
    OpCase(
        "_addmm_activation",
        lambda c, a, b: jax.nn.relu(c + a @ b),
        (normal(5), *_MATRICES),
        "jax.nn.relu(c + a @ b)",
    ),
    OpCase(
        "linear",
        lambda x, w, b: x @ w.T + b,
        (normal(4, 6), normal(5, 6), normal(5)),
        "x @ w.T + b",
    ),
    OpCase(
        "chain_matmul",
        lambda *xs: jnp.linalg.multi_dot(xs),
        _CHAIN,
        "jnp.linalg.multi_dot([x, y, z])",
    ),
    OpCase(
        "multi_dot",
        lambda *xs: jnp.linalg.multi_dot(xs),
        _CHAIN,
        "jnp.linalg.multi_dot([x, y, z])",
    ),
    OpCase(
        "einsum",
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        _BATCHES,
        'jnp.einsum("bij,bjk->bik", x, y)',
    ),
    OpCase(
        "tensordot",
        lambda x, y: jnp.tensordot(x, y, axes=2),
        (normal(4, 3, 5), normal(3, 5, 6)),
        "jnp.tensordot(x, y, axes=2)",
    ),
    OpCase("dot", jnp.dot, (positive(6), positive(6)), "jnp.dot(x, y)"),
    OpCase("inner", jnp.inner, (normal(4, 6), normal(5, 6)), "jnp.inner(x, y)"),
    OpCase("vdot", jnp.vdot, (positive(6), positive(6)), "jnp.vdot(x, y)"),
    OpCase(
        "linalg_vecdot",
        jnp.linalg.vecdot,
        (normal(4, 6), normal(4, 6)),
        "jnp.linalg.vecdot(x, y)",
    ),
    OpCase(
        "bilinear",
        lambda x, w, y, b: jnp.einsum("bi,oij,bj->bo", x, w, y) + b,
        (normal(4, 6), normal(3, 6, 5), normal(4, 5), normal(3)),
        'jnp.einsum("bi,oij,bj->bo", x, w, y) + b',
    ),
    OpCase(
        "scaled_dot_product_attention",
        jax.nn.dot_product_attention,
        _HEADS,
        "jax.nn.dot_product_attention(q, k, v)",
    ),
    OpCase("outer", jnp.outer, (normal(4), normal(5)), "jnp.outer(u, v)"),
    OpCase("kron", jnp.kron, (normal(3, 4), normal(2, 5)), "jnp.kron(x, y)"),
)

"""Decompositions, solvers and functions of matrices.

Vectors that a decomposition leaves free up to a sign or a phase are compared by their
absolute value, or scaled so that their first entry is 1. Eigenvalues that come in no
particular order are sorted.
"""

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import lax

from ._case import OpCase, diagonalizable, invertible, lower, normal, pivots, spd, unit

_SPD = (spd(6),)
_SQUARE = (invertible(6, 6),)
_DIAGONALIZABLE = (diagonalizable(6),)
_TALL = (normal(8, 5),)


def _eig(x):
    values, vectors = jnp.linalg.eig(x)
    order = jnp.argsort(values.real)
    return values[order], (vectors / vectors[:1])[:, order]


def _eigvals(x):
    values = jnp.linalg.eigvals(x)
    return values[jnp.argsort(values.real)]


def _eigh(x):
    values, vectors = jnp.linalg.eigh(x)
    return values, jnp.abs(vectors)


def _svd(x):
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return jnp.abs(u), s, jnp.abs(vh)


def _lu_unpack(lu, pivots):
    eye = jnp.eye(len(lu), dtype=lu.dtype)
    rows = lax.linalg.lu_pivots_to_permutation(pivots, len(lu))
    return eye[:, rows], jnp.tril(lu, -1) + eye, jnp.triu(lu)


_FACTORS = (
    OpCase(
        "cholesky",
        jnp.linalg.cholesky,
        _SPD,
        "jnp.linalg.cholesky(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_cholesky",
        jnp.linalg.cholesky,
        _SPD,
        "jnp.linalg.cholesky(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_cholesky_ex",
        jnp.linalg.cholesky,
        _SPD,
        "jnp.linalg.cholesky(x)",
        index=(0,),
        traces_16bit=False,
    ),
    OpCase(
        "qr",
        jnp.linalg.qr,
        _TALL,
        "jnp.linalg.qr(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_qr",
        jnp.linalg.qr,
        _TALL,
        "jnp.linalg.qr(x)",
        traces_16bit=False,
    ),
    OpCase(
        "geqrf",
        lambda x: jnp.linalg.qr(x, mode="raw"),
        _TALL,
        'jnp.linalg.qr(x, mode="raw")',
        traces_16bit=False,
    ),
    OpCase(
        "orgqr",
        lax.linalg.householder_product,
        (*_TALL, unit(5)),
        "lax.linalg.householder_product(a, taus)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_householder_product",
        lax.linalg.householder_product,
        (*_TALL, unit(5)),
        "lax.linalg.householder_product(a, taus)",
        traces_16bit=False,
    ),
    OpCase(
        "ormqr",
        lax.linalg.ormqr,
        (*_TALL, unit(5), normal(8, 3)),
        "lax.linalg.ormqr(a, taus, c)",
        traces_16bit=False,
    ),
    OpCase(
        "_lu_with_info",
        jsl.lu_factor,
        _SQUARE,
        "jax.scipy.linalg.lu_factor(x)",
        index=(0, 1),
        traces_16bit=False,
    ),
    OpCase(
        "lu_unpack",
        _lu_unpack,
        (*_SQUARE, pivots(6)),
        "jnp.eye(n)[:, lax.linalg.lu_pivots_to_permutation(pivots, n)], "
        "jnp.tril(lu, -1) + jnp.eye(n), jnp.triu(lu)",
    ),
)

_SPECTRA = (
    OpCase(
        "svd",
        _svd,
        _TALL,
        "jnp.linalg.svd(x, full_matrices=False)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_svd",
        _svd,
        _TALL,
        "jnp.linalg.svd(x, full_matrices=False)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_svdvals",
        jnp.linalg.svdvals,
        _TALL,
        "jnp.linalg.svdvals(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_eig",
        _eig,
        _DIAGONALIZABLE,
        "jnp.linalg.eig(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_eigvals",
        _eigvals,
        _DIAGONALIZABLE,
        "jnp.linalg.eigvals(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_eigh",
        _eigh,
        _SPD,
        "jnp.linalg.eigh(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_eigvalsh",
        jnp.linalg.eigvalsh,
        _SPD,
        "jnp.linalg.eigvalsh(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_cond",
        jnp.linalg.cond,
        _SQUARE,
        "jnp.linalg.cond(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_matrix_rank",
        jnp.linalg.matrix_rank,
        _TALL,
        "jnp.linalg.matrix_rank(x)",
        traces_16bit=False,
    ),
    OpCase(
        "pinverse",
        jnp.linalg.pinv,
        _TALL,
        "jnp.linalg.pinv(x)",
        traces_16bit=False,
    ),
)

_SOLVERS = (
    OpCase(
        "inverse",
        jnp.linalg.inv,
        _SQUARE,
        "jnp.linalg.inv(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_inv",
        jnp.linalg.inv,
        _SQUARE,
        "jnp.linalg.inv(x)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_inv_ex",
        jnp.linalg.inv,
        _SQUARE,
        "jnp.linalg.inv(x)",
        index=(0,),
        traces_16bit=False,
    ),
    OpCase(
        "linalg_tensorinv",
        lambda x: jnp.linalg.tensorinv(x, ind=1),
        (invertible(6, 2, 3),),
        "jnp.linalg.tensorinv(x, ind=1)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_solve",
        jnp.linalg.solve,
        (*_SQUARE, normal(6, 2)),
        "jnp.linalg.solve(a, b)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_tensorsolve",
        jnp.linalg.tensorsolve,
        (invertible(2, 3, 6), normal(2, 3)),
        "jnp.linalg.tensorsolve(a, b)",
        traces_16bit=False,
    ),
    OpCase(
        "linalg_lstsq",
        jnp.linalg.lstsq,
        (*_TALL, normal(8, 2)),
        "jnp.linalg.lstsq(a, b)",
        traces_16bit=False,
    ),
    OpCase(
        "lu_solve",
        lambda lu, pivots, b: jsl.lu_solve((lu, pivots), b),
        (*_SQUARE, pivots(6), normal(6, 2)),
        "jax.scipy.linalg.lu_solve((lu, pivots), b)",
    ),
    OpCase(
        "triangular_solve",
        lambda a, b: jsl.solve_triangular(a, b, lower=True),
        (lower(6), normal(6, 2)),
        "jax.scipy.linalg.solve_triangular(a, b, lower=True)",
    ),
    OpCase(
        "cholesky_solve",
        lambda a, b: jsl.cho_solve((a, True), b),
        (lower(6), normal(6, 2)),
        "jax.scipy.linalg.cho_solve((a, True), b)",
    ),
    OpCase(
        "cholesky_inverse",
        lambda a: jsl.cho_solve((a, True), jnp.eye(len(a), dtype=a.dtype)),
        (lower(6),),
        "jax.scipy.linalg.cho_solve((a, True), jnp.eye(len(a), dtype=a.dtype))",
    ),
)

_FUNCTIONS = (
    OpCase(
        "linalg_det", jnp.linalg.det, _SQUARE, "jnp.linalg.det(a)", traces_16bit=False
    ),
    OpCase(
        "linalg_slogdet",
        jnp.linalg.slogdet,
        _SQUARE,
        "jnp.linalg.slogdet(a)",
        traces_16bit=False,
    ),
    OpCase("linalg_norm", jnp.linalg.norm, _SQUARE, "jnp.linalg.norm(a)"),
    OpCase(
        "matrix_exp", jsl.expm, _SQUARE, "jax.scipy.linalg.expm(a)", traces_16bit=False
    ),
    OpCase(
        "matrix_power",
        lambda a: jnp.linalg.matrix_power(a, 3),
        _SQUARE,
        "jnp.linalg.matrix_power(a, 3)",
    ),
    OpCase("linalg_lu", jsl.lu, _SQUARE, "jax.scipy.linalg.lu(a)", traces_16bit=False),
)

CASES = (*_FACTORS, *_SPECTRA, *_SOLVERS, *_FUNCTIONS)

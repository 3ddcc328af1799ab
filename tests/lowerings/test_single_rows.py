"""Products of a single row, of jamp's own, on processors with 16-bit instructions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processors import processor_with
from products import (
    assert_equal_derivatives,
    cast,
    einsum_of,
    operands_of_product,
)

# What XLA is given of a row and a matrix, the row first; of a matrix whose rows are
# added up, halves.
SINGLE_ROWS = {
    "row, matrix": ("ik,kj->ij", (1, 6), (6, 5), "2x2x3xbf16>, tensor<2x3x5xbf16>"),
    "vector, matrix": ("k,kj->j", (6,), (6, 5), "2x2x3xbf16>, tensor<2x3x5xbf16>"),
    "an odd number": ("k,kj->j", (7,), (7, 5), "2x7xbf16>, tensor<7x5xbf16>"),
    "columns": ("ik,jk->ij", (1, 6), (5, 6), "2x6xbf16>, tensor<5x6xbf16>"),
    "matrix, vector": ("jk,k->j", (5, 6), (6,), "2x6xbf16>, tensor<5x6xbf16>"),
    "matrix, columns": ("jk,ik->ji", (5, 6), (1, 6), "2x6xbf16>, tensor<5x6xbf16>"),
    "two ones": ("akb,kj->abj", (1, 6, 1), (6, 5), "2x2x3xbf16>, tensor<2x3x5xbf16>"),
    "rows of stacks": (
        "bk,kbj->bj",
        (2, 24),
        (24, 2, 25),
        "2x2x24xbf16>, tensor<24x2x25xbf16>",
    ),
    "one query's scores": (
        "bqhd,bkhd->bhqk",
        (2, 1, 3, 16),
        (2, 40, 3, 16),
        "2x3x2x16xbf16>, tensor<2x40x3x16xbf16>",
    ),
}


@pytest.mark.parametrize("name", SINGLE_ROWS)
def test_a_single_row_is_multiplied_as_two_rows(name, tmp_path, monkeypatch):
    """XLA would write out the matrix in float32."""
    for few in ("_FEW_NUMBERS", "_FEW_OF_EACH"):
        monkeypatch.setattr(f"jamp._lowerings.product.{few}", 0)
    *product, operands = SINGLE_ROWS[name]
    fn, x, y, low = einsum_of(*product)
    with processor_with("avx512_bf16", tmp_path):
        assert operands_of_product(cast(fn), *low) == operands
        found = jax.jit(cast(fn))(*low)
        assert_equal_derivatives(fn, x, y)
    np.testing.assert_array_equal(found, fn(x, y))


SMALL = {
    "in the cache": ((1, 128), (128, 64), "ij,jk->ik", "f32"),
    "large": ((1, 1024), (1024, 512), "ij,jk->ik", "bf16"),
    "a stack of small ones": ((1024, 128), (1024, 10, 128), "bd,bnd->bn", "f32"),
    "a stack of large ones": ((16, 256), (16, 256, 256), "bd,bnd->bn", "bf16"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_row_is_multiplied_in_float32_by_small_matrices(name, tmp_path):
    *shapes, subscripts, dtype = SMALL[name]
    row, matrix = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    fn = cast(functools.partial(jnp.einsum, subscripts))
    with processor_with("avx512_bf16", tmp_path):
        operands = operands_of_product(fn, row, matrix)
    assert re.findall(r"x([a-z]+\d+)>", operands) == [dtype] * 2

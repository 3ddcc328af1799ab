"""Every primitive that jamp names exists in the JAX at hand."""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection

import jax
import jax.lax.linalg
import pytest
from jax.extend.core import Primitive

from jamp import _primitives as primitives
from jamp._plan.programs import STRUCTURAL
from jamp._plan.values import NUMPY_OF

RELEASE = ".".join(jax.__version__.split(".")[:2])

# Those that only one end of the supported releases has.
ONE_RELEASE = {"call": "0.10", "closed_call": "0.10", "one_minus_square": "0.12"}

TABLES = {
    name: table
    for name, table in vars(primitives).items()
    if name.isupper() and isinstance(table, Collection)
}
TABLES |= {"rules": STRUCTURAL, "numbers": NUMPY_OF}


@functools.cache
def known() -> set[str]:
    """Names of all primitives that there are."""
    # Of its class alone: some objects warn where they are asked for another.
    found = (o for o in gc.get_objects() if issubclass(type(o), Primitive))
    return {primitive.name for primitive in found}


@pytest.mark.parametrize("table", TABLES)
def test_every_primitive_of_a_table_exists_in_jax(table):
    expected = {n for n in TABLES[table] if ONE_RELEASE.get(n, RELEASE) == RELEASE}
    assert not expected - known()


@pytest.mark.skipif(RELEASE not in ONE_RELEASE.values(), reason="between both ends")
def test_a_name_of_one_release_is_unknown_to_the_other():
    assert not {n for n, found in ONE_RELEASE.items() if found != RELEASE} & known()

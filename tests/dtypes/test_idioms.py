"""What users write by hand is as good under autocast as float32 on the same numbers.

`tests/dtypes/idioms/unsafe.txt` lists what is not: docs/sharp_bits.md argues each line.
`python -m tests.dtypes.idioms` prints every error, `--write` writes the list anew.
`tests/dtypes/idioms/beyond_torch.txt` lists what is further off than in torch.
"""

import math
from functools import partial

import jax.numpy as jnp
import pytest
from idioms import (
    BEYOND_TORCH,
    CORE,
    IDIOMS,
    NAMED,
    UNSAFE,
    Idiom,
    cases,
    under_autocast,
)
from idioms._programs import differentiated, flat

KNOWN = UNSAFE.read_text().splitlines()
ROUNDING = 0.5  # of a spacing, as of the 16-bit result that is float32 in torch


def unsafe(idiom):
    found = list(cases(idiom))
    assert found
    return {case.key for case in found if not case.safe}


@pytest.mark.numbers
@pytest.mark.parametrize(
    "name",
    [
        name if name in CORE else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMED
    ],
)
def test_an_idiom_loses_nothing_that_float32_keeps(name):
    assert unsafe(NAMED[name]) == {key for key in KNOWN if key.split()[1] == name}


def test_the_list_names_idioms_once():
    assert sorted(set(KNOWN)) == KNOWN
    assert {key.split()[1] for key in KNOWN} <= set(NAMED)
    assert len(NAMED) == sum(map(len, IDIOMS.values()))
    assert set(NAMED) >= CORE


@pytest.mark.slow
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_an_idiom_is_as_good_as_in_torch_with_its_casts_to_float32(name, cast):
    """Where torch is installed: it is no part of the `test` extra."""
    pytest.importorskip("torch")
    from idioms.in_torch import WITHOUT, in_torch

    if name in WITHOUT:
        pytest.skip("uses what has no counterpart in torch")
    idiom = NAMED[name]
    torchs = {
        (case.std, case.mean, case.of): case.error
        for case in cases(idiom, ("cpu",), lambda idiom, _: in_torch(idiom, cast=True))
    }
    found = cases(idiom, ("cpu",), partial(under_autocast, cast=cast))
    beyond = {
        f"{'cast' if cast else 'as-written'} {name} {case.of}"
        for case in found
        if case.error > torchs.get((case.std, case.mean, case.of), math.inf) + ROUNDING
    }
    assert beyond <= set(BEYOND_TORCH.read_text().splitlines())


def variance_in_16_bits(x):
    x = x.astype(jnp.bfloat16)
    return ((x * x).mean(-1) - x.mean(-1) ** 2).astype(jnp.float32)


def variance_that_float32_loses(x):
    x = 1.1 * x + 1e6
    return (x * x).mean(-1) - x.mean(-1) ** 2


def twice_as_large(idiom, policy):
    """An idiom run wrongly."""
    return differentiated(flat(lambda x: 2 * idiom.fn(x)), idiom)


def test_steps_in_16_bits_are_unsafe():
    found = list(cases(Idiom(variance_in_16_bits, (4, 32), ()), ("gpu",)))
    assert {case.of for case in found if not case.safe} == {"forward"}
    assert any(case.safe for case in found)


def test_what_float32_loses_is_not_counted():
    def found(fn):
        return list(cases(Idiom(fn, (4, 32), ()), ("gpu",), twice_as_large))

    assert not any(case.safe for case in found(jnp.sin))
    lost = found(variance_that_float32_loses)
    assert len(lost) < len(found(jnp.sin))

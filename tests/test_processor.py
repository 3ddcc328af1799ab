"""The warning that 16 bits are slow on a processor that cannot multiply them."""

import warnings

import jax.numpy as jnp
import pytest

import jamp
from jamp import _processor

OLD = "model name\t: An x86\nflags\t\t: fpu sse2 avx2 avx512f\n\nprocessor: 1"
X = jnp.ones((2, 2))


@pytest.mark.parametrize(
    ("cpu_info", "multiplies"),
    [
        (OLD, False),
        (OLD.replace("avx512f", "avx512f avx512_bf16"), True),
        (OLD.replace("avx512f", "amx_bf16 amx_tile"), True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", None),
    ],
)
def test_processors_are_told_by_their_flags(cpu_info, multiplies):
    assert _processor.multiplies_bfloat16(cpu_info) is multiplies


@pytest.fixture
def old_processor(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(OLD, encoding="utf-8")
    monkeypatch.setattr(_processor, "_CPU_INFO", file)
    _processor.warn_if_slow.cache_clear()


@pytest.mark.usefixtures("old_processor")
def test_autocast_on_a_slow_processor_warns_once_where_it_is_called():
    with pytest.warns(jamp.JampWarning, match="saves no time on it") as caught:
        jamp.autocast(jnp.matmul)(X, X)
        jamp.autocast(jnp.dot)(X, X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize("options", [{"device_type": "gpu"}, {"enabled": False}])
def test_other_devices_and_a_disabled_autocast_warn_of_nothing(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jamp.autocast(jnp.matmul, **options)(X, X)

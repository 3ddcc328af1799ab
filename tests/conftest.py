"""Settings shared by all tests, and the guard against a second copy of a package."""

import sys

import hypothesis
import jax
import pytest

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jamp", deadline=None, derandomize=True, print_blob=True, max_examples=50
)
hypothesis.settings.load_profile("jamp")

# Programs on several devices are tested on as many virtual ones.
jax.config.update("jax_num_cpu_devices", 8)

INSTALLED_INSIDE_JAMP = ("policies", "pallas_kernels")


def top_level_copies(modules):
    return [name for name in INSTALLED_INSIDE_JAMP if name in modules]


def pytest_runtest_teardown(item):
    copies = top_level_copies(sys.modules)
    if copies:
        item.session.shouldfail = (
            f"{item.nodeid} imported {', '.join(copies)} from the repository's root: a "
            "second copy of what is installed as jamp.policies or jamp.pallas_kernels"
        )


@pytest.fixture(scope="module")
def fast_compilation():
    """Most of the time goes to compiling; what is compared here needs no speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

"""Settings shared by all tests, and the guard against a second copy of a package."""

import os
import shutil
import sys
from pathlib import Path

import hypothesis
import jax
import jaxlib

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jamp", deadline=None, derandomize=True, print_blob=True, max_examples=50
)
hypothesis.settings.load_profile("jamp")

# Programs on several devices are tested on as many virtual ones.
jax.config.update("jax_num_cpu_devices", 8)

# Most of the time would go to making small programs fast. What LLVM leaves out here
# comes after the HLO, so that the text of compiled programs is the usual one.
jax.config.update("jax_disable_most_optimizations", True)

# The compiler of JAX 0.10 can make its kernels the old way, in half of the time.
if jaxlib.version.__version_info__ < (0, 11):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"

# Compiled programs are shared by the worker processes and kept for the next run.
CACHE = Path(__file__).parents[1] / ".jax_cache"
CACHE_LIMIT = 2**30  # bytes; a run leaves a tenth of it
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

INSTALLED_INSIDE_JAMP = ("policies", "pallas_kernels")


def top_level_copies(modules):
    return [name for name in INSTALLED_INSIDE_JAMP if name in modules]


def pytest_configure(config):
    if not hasattr(config, "workerinput") and CACHE.is_dir():
        if sum(entry.stat().st_size for entry in CACHE.iterdir()) > CACHE_LIMIT:
            shutil.rmtree(CACHE)


def pytest_runtest_teardown(item):
    copies = top_level_copies(sys.modules)
    if copies:
        item.session.shouldfail = (
            f"{item.nodeid} imported {', '.join(copies)} from the repository's root: a "
            "second copy of what is installed as jamp.policies or jamp.pallas_kernels"
        )

"""Settings shared by all tests, and the guard against a second copy of a package."""

import gc
import itertools
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import jax
import jaxlib
import pytest

# No public function makes the context of a lowering.
from jax._src.interpreters import mlir  # noqa: TID251
from processors import processor_with

from jamp._diagnose import examination

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jamp", deadline=None, derandomize=True, print_blob=True, max_examples=50
)
hypothesis.settings.load_profile("jamp")

# Programs on several devices are tested on as many virtual ones.
jax.config.update("jax_num_cpu_devices", 8)

ON_CPU = not os.environ.get("JAX_PLATFORMS", "cpu").startswith("cuda")

# Most of the time would go to making small programs fast. What LLVM leaves out here
# comes after the HLO, so that the text of compiled programs is the usual one.
jax.config.update("jax_disable_most_optimizations", ON_CPU)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(ON_CPU)  # in processes tests start

# A program of a few kernels is compiled sooner in one part than in many.
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]

if jaxlib.version.__version_info__ < (0, 11):
    # The compiler of JAX 0.10 can make its kernels the old way, in half of the time.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

if not hasattr(mlir, "_thread_local_context"):
    # Making the context to lower a program in takes longer than lowering a small one.
    # JAX 0.12 uses a context for ten programs; so do the tests on older ones.
    make_context, lowered, contexts = mlir.make_ir_context, itertools.count(), []

    def shared_context():
        if next(lowered) % 10 == 0:
            contexts[:] = [make_context()]
        return contexts[0]

    mlir.make_ir_context = shared_context

# The equations of small programs are much the same: what one diagnosis has compiled of
# them serves the next.
steps, examine = {}, examination.examine


def examine_with_shared_steps(subject, _, shown, settings):
    return examine(subject, steps, shown, settings)


examination.examine = examine_with_shared_steps

# Most objects are caches of JAX and stay: looking through them for garbage is in vain.
gc.set_threshold(50_000, 20, 100)

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


@pytest.fixture
def earlier_objects_left_alone():
    """Garbage is looked for among new objects: the checks for leaks do so often."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def choose_processor(tmp_path):
    """Gives this machine another processor, as `processor_with` does."""
    with ExitStack() as stack:
        yield lambda described: stack.enter_context(processor_with(described, tmp_path))


@pytest.fixture
def amx(choose_processor):
    choose_processor("amx_bf16")


@pytest.fixture(scope="module", params=["old", "avx512_bf16"])
def on_processor(request, tmp_path_factory):
    with processor_with(request.param, tmp_path_factory.mktemp("processor")):
        yield

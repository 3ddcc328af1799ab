"""Which line of a program is called the user's own."""

import sys
import textwrap
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

import jamp

INSTALLED = "/venv/lib/python3.12/site-packages"
SOURCE = textwrap.dedent("""
    import jamp

    def fn(x):
        return x @ x

    def explain(x):
        return jamp.explain(fn, device_type="gpu")(x)
""")
X = jnp.ones((2, 2))


def compiled(file):
    """The names of a module that stands in a file of this path."""
    names = {"__name__": "mine"}
    exec(compile(SOURCE, file, "exec"), names)
    return names


def locations(report):
    return {(r.location.file, r.location.line) for r in report.records if r.location}


@pytest.mark.parametrize(
    "file",
    [
        f"{Path(jamp.__file__).parent}_experiments/train.py",
        f"{Path(jamp.__file__).parents[1]}/my-site-packages/train.py",
        "/home/me/jax/train.py",
    ],
)
def test_a_folder_whose_name_begins_as_anothers_is_the_users(file):
    assert locations(compiled(file)["explain"](X)) == {(file, 5)}


@pytest.mark.parametrize("file", ["mine.py", "mine/inner/train.py", "jax_of_mine.py"])
def test_an_installed_package_is_the_users_where_nothing_else_is(file):
    path = f"{INSTALLED}/{file}"
    names = compiled(path)
    assert locations(names["explain"](X)) == {(path, 5)}
    # JAX traces matmul anew for another shape.
    report = jamp.explain(lambda x: names["fn"](x))(jnp.ones((3, 3)))
    assert {file for file, _ in locations(report)} == {__file__}


def test_a_library_that_is_installed_for_being_edited_is_not_the_users(monkeypatch):
    """Numbers depend on it: casts that a library makes are not the user's."""
    linen = types.ModuleType("flax")
    linen.__path__ = ["/home/me/src/flax/flax"]
    monkeypatch.setitem(sys.modules, "flax", linen)
    names = compiled("/home/me/src/flax/flax/linen/edited.py")
    assert locations(names["explain"](X)) == set()
    example = "/home/me/src/flax/examples/train.py"
    assert locations(compiled(example)["explain"](X)) == {(example, 5)}


@pytest.mark.parametrize("library", ["jax", "flax", "optax", "equinox", "numpy"])
def test_a_known_library_is_never_the_users(library):
    names = compiled(f"{INSTALLED}/{library}/inner.py")
    assert locations(names["explain"](X)) == set()

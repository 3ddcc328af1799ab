"""Public names look like what they are to help(), inspect and typing."""

import inspect
import pydoc
import re
import types
import typing

import pytest

import jamp

FUNCTIONS = [name for name in jamp.__all__ if not inspect.isclass(getattr(jamp, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_is_shown_as_one(name):
    function = getattr(jamp, name)
    assert isinstance(function, types.FunctionType)
    assert repr(function).startswith(f"<function {name} at ")
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert f": function {name} in " in shown
    first = next(iter(inspect.signature(function).parameters))
    assert re.search(rf"^{name}\(\s*{first}\b", shown, re.MULTILINE)


@pytest.mark.parametrize("name", jamp.__all__)
def test_annotations_can_be_read(name):
    public = getattr(jamp, name)
    typing.get_type_hints(public)
    if inspect.isclass(public) and not issubclass(public, Exception):
        inspect.signature(public)
        for method in vars(public).values():
            if inspect.isfunction(method) and method.__module__ == public.__module__:
                typing.get_type_hints(method)

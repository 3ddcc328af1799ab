"""Functions and their example inputs, as the command line names them."""

import importlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from jamp._errors import JampError, TargetError
from jamp._tracing.origin import is_users


def load_function(target: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names.

    Modules are looked for in the working directory too.
    """
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise TargetError(
            f"{target!r} does not name a function: write module:function, as in "
            "train:loss_fn, or file.py:function"
        )
    names = _load_file(module) if module.endswith(".py") else _import(module)
    if name not in names:
        raise TargetError(f"{module} has no {name!r}")
    found = names[name]
    if not callable(found):
        raise TargetError(f"{target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def load_inputs(file: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Example inputs from a Python file that sets `args`, and `kwargs` if wanted."""
    names = _load_file(file)
    args, kwargs = names.get("args"), names.get("kwargs", {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise TargetError(
            f"{file} must set args, a tuple of the function's arguments, as in "
            "args = (params, batch); and may set kwargs, a dict"
        )
    return tuple(args), kwargs


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Turns what the user's code raises into an error that names the user's line.

    Its message begins with what is being done. Errors of jamp's stay as they are.
    """
    try:
        yield
    except JampError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{f.filename}:{f.lineno}" for f in frames if is_users(f.filename)]
        where = f" at {places[-1]}" if places else ""
        raise TargetError(
            f"{doing} failed{where}: {type(error).__name__}: {error}"
        ) from error


def _import(module: str) -> Mapping[str, Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")
    with users_code(f"importing {module}"):
        return vars(importlib.import_module(module))


def _load_file(file: str) -> Mapping[str, Any]:
    """The names of a file, which is run once also if another one imports it."""
    folder = Path(file).parent.resolve()
    path = folder / Path(file).name
    if not path.is_file():
        raise TargetError(f"there is no file {file}")
    # It may import what stands beside it, as a script may.
    sys.path.insert(0, str(folder))
    with users_code(f"running {file}"):
        found = PathFinder.find_spec(path.stem, [str(folder)])
        loaded = sys.modules.get(path.stem)
        origin = loaded.__spec__ if loaded else found
        if origin is None or origin.origin != str(path):
            # Another module has its name, or it has none that can be imported.
            return runpy.run_path(str(path))
        return vars(importlib.import_module(path.stem))

"""Functions as policy entries: a dotted name or object, and the code it runs.

A function is recognised by the identity of its unwrapped code object, never by its
name, so that a user's own `softmax` is not taken for the library's.
"""

import functools
import inspect
import pkgutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, Self

from jamp._compat import inlined
from jamp._errors import PolicyError, did_you_mean

_MOST_WRAPPERS = 1000


def code_of(obj: Any) -> CodeType | None:
    """The code object that runs when `obj` is called, or None if there is none.

    Looks through partials, jit, custom_jvp and every decorator that keeps
    `__wrapped__`; a class stands for its `__call__` method, a property for what
    computes it.
    """
    if inspect.isclass(obj):
        # Not that of its metaclass, which makes the instances.
        own = (vars(kind).get("__call__") for kind in obj.__mro__)
        obj = next(filter(None, own), None)
    obj = _getter(obj)
    for _ in range(_MOST_WRAPPERS):
        if inlined(obj):
            raise PolicyError(
                f"JAX inlines {getattr(obj, '__name__', obj)} where it is called, so "
                "that its calls cannot be recognised; give a rule to its primitives, "
                "which jax.make_jaxpr shows"
            )
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif hasattr(obj, "__wrapped__"):
            obj = obj.__wrapped__
        elif inspect.ismethod(obj):
            obj = obj.__func__
        else:
            code = getattr(obj, "__code__", None)
            return code if isinstance(code, CodeType) else None
    raise PolicyError(f"{obj!r} wraps itself: its __wrapped__ never ends")


def _getter(obj: Any) -> Any:
    """The function that computes a property; anything else as it is."""
    if isinstance(obj, functools.cached_property):
        return obj.func
    return obj.fget if isinstance(obj, property) else obj


@dataclass(frozen=True)
class Function:
    name: str  # dotted, as shown in reports
    # None for what was given by name, which is resolved when its module is imported.
    code: CodeType | None = field(default=None, compare=False)
    # Whether it is an error that its module is imported and lacks it. Tables that come
    # with jamp name functions that not every release of a library has.
    required: bool = field(default=True, compare=False)
    # Whether a table's rule holds for calls alone in which everything is elementwise.
    elementwise: bool = False
    # Whether a table's rule holds for the function's own code alone, and not for what
    # it is handed, as a layer its `dot_general`.
    own_code: bool = False
    # The file and key of a table, for an error about a name that is looked up later.
    where: str = field(default="", compare=False)
    # Code of two files is equal if its text and line are.
    code_id: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        code_id = None if self.code is None else id(self.code)
        object.__setattr__(self, "code_id", code_id)

    @classmethod
    def of(cls, obj: Any) -> Self:
        obj = _getter(obj)
        code, kind = code_of(obj), type(obj)
        if code is None and not hasattr(obj, "__name__") and code_of(kind) is not None:
            raise PolicyError(
                f"got an instance of {kind.__name__}, and a rule holds for functions "
                f"and classes: give {kind.__name__} itself, for all its instances"
            )
        while isinstance(obj, functools.partial):
            obj = obj.func
        module = getattr(obj, "__module__", None) or "?"
        qualname = getattr(obj, "__qualname__", repr(obj))
        if code is None:
            named = f"{module}.{qualname}" if hasattr(obj, "__qualname__") else qualname
            raise PolicyError(
                f"{named} is no Python function or class with a __call__ method, so "
                "jamp cannot recognise its calls; name the function that it wraps, or "
                "the primitive that it calls"
            )
        return cls(_public_name(module, qualname, code), code)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Code can't be pickled; where the name stands for it, the name is enough.
        by_name = Function(self.name, required=False)
        if self.code is None or by_name.resolve() is not self.code:
            return super().__reduce_ex__(protocol)
        known = self.name, self.required, self.elementwise, self.own_code, self.where
        return _named, known

    def resolve(self) -> CodeType | None:
        """The code object, or None while the function's module is not imported."""
        try:
            return self.code or _resolve(self.name)
        except PolicyError as error:
            if not self.required:
                return None
            if self.where:
                raise PolicyError(f"{self.where}: {error}") from None
            raise

    @property
    def identity(self) -> int | str:
        """What all names of one function have in common, once it is imported."""
        code = self.resolve()
        return self.name if code is None else id(code)

    @property
    def lacks_package(self) -> bool:
        """Whether its package is not installed, let alone imported."""
        return self.resolve() is None and find_spec(self.name.split(".")[0]) is None


def _public_name(module: str, qualname: str, code: CodeType) -> str:
    """The shortest name of a function through no private module, if it has one."""
    public = [part for part in module.split(".") if not part.startswith("_")]
    for count in range(1, len(public) + 1):
        name = ".".join([*public[:count], qualname])
        with suppress(PolicyError):
            if _resolve(name) is code:
                return name
    return f"{module}.{qualname}"


def _named(name: str, *known: Any) -> Function:
    return Function(name, _resolve(name), *known)


@functools.cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def _resolve(name: str) -> CodeType | None:
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)):
        raise PolicyError(f"{name!r} is not a dotted name")
    if parts[0] == "jax" and ".".join(parts[:-1]) not in sys.modules:
        # JAX imports some of its public modules on demand; all of it is there anyway.
        with suppress(ImportError, AttributeError):
            pkgutil.resolve_name(name)
    cut, last = len(parts) - 1, parts[-1]
    while cut and sys.modules.get(".".join(parts[:cut])) is None:
        cut -= 1
    if not cut:
        return None
    obj: Any = sys.modules[".".join(parts[:cut])]
    for place, part in enumerate(parts[cut:], cut):
        if _is_listed_alone(obj, part):
            return None
        try:
            held, obj = obj, getattr(obj, part, None)
        except ImportError:
            return None
        is_last = place + 1 == len(parts)
        if obj is None:
            package = place == cut and not is_last and hasattr(held, "__path__")
            if package and _is_installed(f"{held.__name__}.{part}"):
                return None  # a module that is not imported yet
            near = [f"{name.removesuffix(last)}{other}" for other in dir(held)]
            hint = did_you_mean(name, near) if is_last else ""
            raise PolicyError(f"there is no function {name!r}{hint}")
    code = code_of(obj)
    if code is None:
        raise PolicyError(f"{name!r} is no Python function or class")
    return code


def _is_listed_alone(held: Any, part: str) -> bool:
    """Whether a module lists something that it imports when it is asked for it."""
    lists = isinstance(held, ModuleType) and part in dir(held)
    return lists and part not in vars(held)

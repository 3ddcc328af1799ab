"""What may be traced, taken and returned."""

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jamp._compat import is_plain_array
from jamp._errors import AutocastTypeError

# What takes a dtype by another keyword than `dtype`, or by none, as no device type.
_DTYPE_KEYWORDS = {
    "custom_bwd": "cast_inputs",
    "custom_fwd": "cast_inputs",
    "value_and_grad": None,
}
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is traced, as a shape for an array may be.

    Others are passed through.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _is_jaxs(leaf.dtype)
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


@functools.lru_cache(maxsize=1024)
def _is_jaxs(dtype: np.dtype[Any]) -> bool:
    """Whether JAX has arrays of a dtype: it has none of text or dates, for one."""
    try:
        jax.typeof(np.empty(0, dtype))
    except TypeError:
        return False
    return True


def refuse_linen(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises for a module of flax.linen: without parameters, or with some that leak."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return
    if isinstance(fn, linen.Module) and fn.scope is None and fn.parent is None:
        name = type(fn).__name__
        raise AutocastTypeError(
            f"autocast takes a function, got the flax.linen module {name}, which holds "
            "no parameters: wrap its apply, as in jamp.autocast(model.apply)(params, x)"
        )
    for value in (fn, getattr(fn, "__self__", None), *args[:1]):
        if not isinstance(value, linen.Module) or value.scope is None:
            continue
        # What is bound to variables that are only read may be called in a trace; and
        # what `nn.compact` marked is not known for it any more.
        if value.scope.mutable is not False or hasattr(fn, "compact"):
            raise AutocastTypeError(
                f"a bound flax.linen module ({type(value).__name__}) collects its "
                "variables as a side effect: wrap the function that calls model.apply"
            )


def refuse_made(result: Any, arguments: Sequence[Any]) -> None:
    """Raises for a result that the function made and that is no value.

    Later calls would get the same object, which may hold what was traced.
    """
    given = {id(leaf) for leaf in arguments}
    # JAX is about to refuse iterators in trees.
    found, _ = jax.tree_util.tree_flatten_with_path(
        result, is_leaf=lambda node: isinstance(node, Iterator)
    )
    for path, leaf in found:
        if isinstance(leaf, jax.core.Tracer) and not is_plain_array(leaf.aval):
            what = f"a value of the type {leaf.aval}: return arrays"
            if hasattr(leaf.aval, "inner_aval"):
                what = (
                    "a reference (jax.new_ref): return what it holds, jax.freeze(ref)"
                )
            raise AutocastTypeError(f"the function under autocast returned {what}")
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if is_shape or not (is_array(leaf) or id(leaf) in given or _is_value(leaf)):
            at = jax.tree_util.keystr(path)
            raise AutocastTypeError(
                f"the function under autocast returned a {type(leaf).__name__}"
                + (f" at result{at}" if at else "")
                + ", which is neither an array nor a constant: return the arrays and "
                "make it of them outside, or register its class as a pytree "
                "(jax.tree_util.register_dataclass)"
            )


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is equal in every call; so it holds no arrays, which differ."""
    if isinstance(leaf, functools.partial):
        parts = (leaf.func, *leaf.args, *leaf.keywords.values())
        return all(map(_is_value, jax.tree.leaves(parts)))
    if isinstance(leaf, np.ndarray | np.generic):
        return not leaf.dtype.hasobject
    if isinstance(leaf, slice):  # hashable since Python 3.12
        leaf = (leaf.start, leaf.stop, leaf.step)
    hashing: Any = type(leaf).__hash__
    by_identity = hashing is object.__hash__ or isinstance(leaf, _METHODS)
    if by_identity and not isinstance(leaf, types.ModuleType):
        return _is_global(leaf)
    try:
        hash(leaf)  # tracers have none
    except TypeError:
        return False
    return True


def may_change(leaf: Any) -> bool:
    """Whether a leaf of a result may be changed, and so is not for another call."""
    kind: Any = type(leaf)
    if isinstance(leaf, np.ndarray | np.void):
        return True
    if kind.__hash__ is object.__hash__ or isinstance(leaf, enum.Enum):
        return False  # it stands in a module, and is one in every call
    # Frozen classes refuse to set attributes.
    return hasattr(leaf, "__dict__") and kind.__setattr__ is object.__setattr__


def _is_global(obj: Any) -> bool:
    """Whether an object stands in a module, or holds nothing."""
    if isinstance(obj, types.FunctionType) and not (
        obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__
    ):
        return True
    if type(obj) is object:
        return True
    found: Any = sys.modules.get(getattr(obj, "__module__", None) or "")
    for name in getattr(obj, "__qualname__", "?").split("."):
        found = getattr(found, name, None)
    return found is obj


def wrong_argnums(argnums: Any) -> AutocastTypeError:
    return AutocastTypeError(
        f"argnums must be the number of an argument, or several, got {argnums!r}"
    )


def wrong_loss(value: Any, has_aux: bool, holomorphic: bool = False) -> str:
    """What is wrong with what a loss function returned, in words; empty if nothing."""
    loss = value
    if has_aux:
        if not (isinstance(value, tuple | list) and len(value) == 2):
            return (
                "with has_aux=True the loss returns a pair (loss, aux), got "
                f"{_described(value)}"
            )
        loss = value[0]
    elif isinstance(value, tuple):
        return (
            "the loss returned a tuple; pass has_aux=True if it is (loss, aux), and if "
            "it is (loss, gradients), give the loss itself, not what differentiates it"
        )
    if loss is None:
        return "the loss function returned None: it lacks a return"
    if not (is_array(loss) or isinstance(loss, int | float)):
        return f"the loss must be a scalar, got {_described(loss)}"
    if shape := np.shape(loss):
        what = f"an array of shape {shape}: take its mean"
        return f"the loss must be a scalar, got {what}"
    dtype = jax.numpy.result_type(loss)
    inexact = np.inexact if holomorphic else np.floating
    if not jax.dtypes.issubdtype(dtype, inexact):
        return f"grad requires a real-valued loss, got {dtype}"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    # Whatever its class while JAX traces.
    return "one array" if is_array(value) else type(value).__name__


def check_function(name: str, fn: Any, inputs: Sequence[Any] = ()) -> None:
    """Raises unless `fn`, alone, was given to what has this name, to be traced."""
    if inputs:
        raise AutocastTypeError(
            f"{name} takes a function alone, and its inputs go to what it returns: "
            f"{name}(fn)(...)"
        )
    keyword = _DTYPE_KEYWORDS.get(name, "dtype")
    if isinstance(fn, str) and keyword:
        got = f"{fn!r}; device_type is a keyword: {name}(fn, device_type={fn!r})"
        if name == "autocast":
            got += f", or @jamp.autocast(device_type={fn!r}) above its def"
    elif isinstance(fn, bool) and name == "autocast":
        got = f"{fn}; enabled is a keyword: `with jamp.autocast(enabled={fn}):`"
    elif isinstance(fn, np.dtype | type(jax.numpy.float16)) or (
        inspect.isclass(fn) and issubclass(fn, np.generic)
    ):
        dtype = np.dtype(fn).name
        got = f"the dtype {dtype}"
        if keyword:
            got += f"; {keyword} is a keyword: {name}({keyword}=jnp.{dtype})"
    elif inspect.isclass(fn):
        got = (
            f"the class {fn.__name__}; decorate its __call__ (flax.nnx) or wrap the "
            "function that calls model.apply (flax.linen)"
        )
    elif isinstance(fn, _DESCRIPTORS):
        kind = type(fn).__name__
        got = f"a {kind}; put @{kind} above @jamp.{name}"
    elif not callable(fn):
        got = f"{type(fn).__name__}; write {name}(fn)(x), not {name}(fn(x))"
        if callable(getattr(fn, "apply", None)):
            got = f"{type(fn).__name__}; give its apply"
        elif {"init", "update"} <= {*getattr(fn, "_fields", ())}:
            got = (
                f"an optimizer; {name} goes around the loss, and "
                "jamp.dynamic_loss_scaling around the optimizer"
            )
    else:
        called = fn, type(fn).__call__
        runs_later = [
            kind for kind, is_one in _RUN_LATER.items() if any(map(is_one, called))
        ]
        if not runs_later:
            return
        got = f"{runs_later[0]}, whose body runs after the call; wrap what it calls"
    raise AutocastTypeError(f"{name} takes a function, got {got}")


_DESCRIPTORS = (classmethod, staticmethod, property, functools.cached_property)
_RUN_LATER = {
    "a generator function": inspect.isgeneratorfunction,
    "an async function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
}

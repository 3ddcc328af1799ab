"""What no public name of JAX gives: the only importer of jax._src.

Some of it would not raise if JAX changed it, and jamp would quietly do less:
`tests/project/test_compat.py` has a test for each.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import jax

# Nothing public turns a setting, such as `jax_remat3`, off for a while.
from jax._src import config as _config

# No public name tells that JAX calls a jitted function of its own.
from jax._src import pjit as _pjit

# Nothing public leaves a library's files out of tracebacks, as JAX does its own.
from jax._src import traceback_util as _traceback_util

# What `checkpoint_name` makes with `jax_remat3` has no public name.
from jax._src.ad_checkpoint import CheckpointName as CheckpointName

# Nor has what `jax.checkpoint` makes with it.
from jax._src.ad_checkpoint import RematTraced as RematTraced

# The rules of `jax.experimental.checkify` have no public name.
from jax._src.checkify import error_checks as error_checks

# Nor has what most of them are made of.
from jax._src.checkify import nan_error_check as nan_error_check

# No public name gives the settings (x64, mesh, matmul precision ...) that a trace
# depends on and that jax.jit itself keys its caches on.
from jax._src.config import trace_context as trace_context

# Nothing public gives the axes of a `jax.vmap` their names again.
from jax._src.core import extend_axis_env_nd as extend_axis_env_nd

# Nor does it tell which axes have names.
from jax._src.core import get_axis_env as get_axis_env

# Nothing public tells which trace is at hand, and around which others it is.
from jax._src.core import trace_ctx as _trace_ctx

# The top-level trace has no public name; jax.core.trace_state_clean is gone.
from jax._src.core import trace_state_clean as _trace_state_clean

# The tracers of `jax.vmap` have no public name.
from jax._src.interpreters.batching import BatchTracer as _BatchTracer

# No public name lists the primitives of the installed JAX; those that can be lowered
# are the ones that a policy may name.
from jax._src.interpreters.mlir import _lowerings, _platform_specific_lowerings

# The trace that makes programs; the class of its tracers is public.
from jax._src.interpreters.partial_eval import (
    DynamicJaxprTrace as _DynamicJaxprTrace,
)

# What a policy of `jax.checkpoint` may answer has no public name.
from jax._src.interpreters.partial_eval import RecomputeType as _RecomputeType

# Nor has what JAX makes of an answer.
from jax._src.interpreters.partial_eval import ensure_enum as _ensure_enum

# Every cast goes through a function there, which returns an array that has the dtype
# already as it is: no public name tells that it was called.
from jax._src.lax import lax as _lax

# Nor have those of an eager `jax.shard_map`.
from jax._src.shard_map import ShardMapTracer as _ShardMapTracer

# A name stack is public, but the scopes in it are not, and its text joins them with the
# names of transformations.
from jax._src.source_info_util import Scope as _Scope

# Nothing public ends a `user_context` inside of another, or tells whether there is one.
from jax._src.source_info_util import _source_info_context
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.extend.linear_util import transformation2
from jax.extend.source_info_util import new_source_info, register_exclusion
from jax.interpreters.partial_eval import DynamicJaxprTracer

_traceback_util.register_exclusion(os.path.dirname(__file__))
# What stands in for JAX's functions is no line of the user's own.
register_exclusion(__file__)
# What it wraps raises with such a traceback.
api_boundary = _traceback_util.api_boundary

# The module whose functions make functions.
_MAKES_FUNCTIONS = inspect.unwrap(jax.vjp).__globals__["__name__"]

# Code objects, innermost first, and the offset of the instruction in each.
Frames = tuple[Sequence[CodeType], Sequence[int]]

# Primitives that the shared tables may name and that the installed JAX need not know:
# each is of another supported release, or dissolves before lowering.
_NAMEABLE = frozenset(
    "call call_hi_primitive closed_call eval_jaxpr log2 one_minus_square "
    "polynomial".split()
)


def under_trace(arrays: Iterable[Any]) -> bool:
    """Whether a JAX transformation is tracing at this moment, or made these arrays."""
    return not _trace_state_clean() or any(
        isinstance(array, jax.core.Tracer) for array in arrays
    )


def becomes_a_program() -> bool:
    """Whether what is computed now is traced to run later, unlike in an eager grad."""
    trace: Any = _trace_ctx.trace
    while trace is not None and not isinstance(trace, _DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def current_trace() -> Any:
    return _trace_ctx.trace


def only_staged(arrays: Iterable[Any]) -> bool:
    """Whether no array is differentiated, or vmapped, at this moment."""
    tracers = (array for array in arrays if isinstance(array, jax.core.Tracer))
    return all(isinstance(tracer, DynamicJaxprTracer) for tracer in tracers)


def trace_of(tracer: Any) -> Any:
    # Nothing public tells of which trace a tracer is.
    return tracer._trace


def array_in(value: Any) -> Any:
    """The array that a tracer of an eager `jax.grad` or `jax.vmap` stands for.

    Nothing public gives it. None for other tracers.
    """
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", getattr(value, "val", None))
    return value if hasattr(value, "dtype") else None


def may_have_tangents(arrays: Iterable[Any]) -> bool:
    """Whether an array may be differentiated at this moment, if this runs op by op."""
    held = [array for array in arrays if isinstance(array, jax.core.Tracer)]
    mapped = [a.val for a in held if isinstance(a, _BatchTracer | _ShardMapTracer)]
    return len(mapped) < len(held) or (bool(mapped) and may_have_tangents(mapped))


def is_made_by_jax(function: Any) -> bool:
    """Whether a function is one that JAX made, as `jax.vjp` makes pullbacks."""
    while isinstance(function, functools.partial):
        # JAX wraps the one that is kept by one that is a pytree.
        function = getattr(function.func, "fun", function.func)
    # Their types have no public name, but the module that jax.vjp comes from.
    return bool(getattr(function, "__module__", None) == _MAKES_FUNCTIONS)


def primitive_names() -> frozenset[str]:
    """Names of all primitives that a supported release of JAX knows how to lower."""
    known: set[Primitive] = set(_lowerings)
    for rules in _platform_specific_lowerings.values():
        known.update(rules)
    return frozenset(primitive.name for primitive in known) | _NAMEABLE


class _RuleOf(tuple[()]):
    """In a name stack, and no name: the frames of the call that a rule is run for."""

    frames: Frames

    def wrap(self, names: list[str]) -> None:
        """Adds nothing to the names of scopes, as JAX has each entry of a stack do."""


def frames(eqn: JaxprEqn) -> Frames:
    """The Python frames that emitted an equation; none if it has no traceback.

    Those of a derivative rule are followed by those of the call that it is run for.
    """
    return _frames(eqn.source_info)


def _frames(source: Any) -> Frames:
    # `jax.extend` gives lines of text; only code objects tell functions apart.
    found: Frames = source.traceback.raw_frames() if source.traceback else ((), ())
    entries = reversed(source.name_stack.stack)
    rule = next((entry for entry in entries if isinstance(entry, _RuleOf)), None)
    if rule is None:
        return found
    runs = (i for i, code in enumerate(found[0]) if code is _run_rule.__code__)
    count = next(runs, None)
    (codes, offsets), (call, call_offsets) = found, rule.frames
    return (*codes[:count], *call), (*offsets[:count], *call_offsets)


@contextmanager
def own_frames(*entries: Any) -> Iterator[None]:
    """What is traced inside has the frames that emit it.

    Where JAX, or jamp, runs an equation, all that is traced has those of the equation.

    Args:
      entries: what is added to its name stack.
    """
    outer = _source_info_context.context
    names = outer.name_stack + type(outer.name_stack)(entries)
    _source_info_context.context = new_source_info().replace(name_stack=names)
    try:
        yield
    finally:
        _source_info_context.context = outer


def in_user_context() -> bool:
    """Whether what is traced here has the frames of a call that it stands in."""
    return _source_info_context.context.traceback is not None


def name_entries(name_stack: Any) -> list[tuple[bool, str]]:
    """The entries of a name stack, outermost first: whether named scopes, and names.

    The others are transformations, such as "jvp" and "transpose".
    """
    return [(isinstance(e, _Scope), getattr(e, "name", "")) for e in name_stack.stack]


def transformations(eqn: JaxprEqn) -> set[str]:
    """What an equation came of, as "jvp" and "transpose", as its name stack says."""
    entries = name_entries(eqn.source_info.name_stack)
    return {name for is_scope, name in entries if not is_scope}


def settings(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """A context with the settings, such as the mesh, that an equation was traced in."""
    # `jax.extend` has the equation, and nothing that enters its context.
    manager: AbstractContextManager[None] = eqn.ctx.manager
    return manager


def is_plain_array(aval: Any) -> bool:
    """Whether an abstract value is that of an array, and not of a reference to one."""
    # No public predicate tells; a subclass may stand for something else.
    return type(aval) is jax.core.ShapedArray


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan equation takes."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12 has a tree of constants, carry and slices.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_saved(answer: Any) -> bool:
    """Whether a checkpoint's policy has something saved; raises as JAX for no answer.

    What is moved elsewhere is saved, too.
    """
    return not isinstance(_ensure_enum(answer), _RecomputeType)


def checkpoint(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Like `jax.checkpoint` without `jax_remat3`.

    With it, JAX cannot transpose a checkpoint that a rule for derivatives holds.
    """

    def checkpointed(*arrays: Any) -> Any:
        with _config.remat3(False):
            return jax.checkpoint(function, **options)(*arrays)

    return checkpointed


def inlined(fn: Any) -> bool:
    """Whether a function is jitted with `inline=True`."""
    # No public attribute tells. What is inlined leaves no frame in what it emits.
    info = getattr(fn, "_jit_info", None)
    # JAX 0.12 has an enumeration where 0.10 has a bool.
    inline = getattr(info, "inline", False)
    return getattr(inline, "name", inline) in (True, "JAX_EARLY")


# What jax.jit takes to leave nothing but the equations of the function behind. Since
# JAX 0.12 `inline=True` inlines later, when a program is lowered.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


_lock = threading.Lock()
# JAX's own functions that others stand in for, each once for every trace that goes on.
_own: dict[tuple[Any, str], list[Any]] = {}


@contextmanager
def _standing_in(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While a program is traced, has what `make` makes of a function of JAX there."""
    traces = _own.setdefault((owner, name), [])
    with _lock:
        own = traces[0] if traces else getattr(owner, name, None)
        if own is not None and not traces:
            setattr(owner, name, make(own))
        traces.append(own)
    try:
        yield
    finally:
        with _lock:
            traces.pop()
            if own is not None and not traces:
                setattr(owner, name, own)


_BIND = "bind_with_trace"


@contextmanager
def around_rules(
    knows: Callable[[], bool], keep: Callable[[Any], Any]
) -> Iterator[None]:
    """While a program is traced, derivative rules emit what has frames of its own.

    JAX runs a rule for an equation: a backward rule always does, and every rule of what
    `jax.jit`, a loop or `jax.checkpoint` holds.

    Args:
      knows: whether the thread that calls it traces such a program.
      keep: what is put in the place of a rule, wherever JAX runs it.
    """
    with ExitStack() as stack:
        for primitive in (custom_jvp_call_p, custom_vjp_call_p):
            make = functools.partial(_framing, knows, keep)
            stack.enter_context(_standing_in(type(primitive), _BIND, make))
        yield


def _framing(knows: Callable[[], bool], keep: Callable[[Any], Any], bind: Any) -> Any:
    def framing(
        primitive: Any, trace: Any, args: Any, avals: Any, params: dict[str, Any]
    ) -> Any:
        if knows():
            function, *rules = params["subfuns"]
            # Rules in a program are given frames when that is run.
            framed = not isinstance(trace, _DynamicJaxprTrace)
            rules = [_wrapped(rule, keep, framed) for rule in rules]
            params = {**params, "subfuns": (function, *rules)}
        return bind(primitive, trace, args, avals, params)

    return framing


def _wrapped(rule: Any, keep: Callable[[Any], Any], framed: bool) -> Any:
    # Since JAX 0.12 a rule may be an object that JAX asks for more than to be called.
    if not (rule.transforms or isinstance(rule.f, FunctionType)):
        return rule
    return _run_in_own_frames(keep(rule)) if framed else keep(rule)


def _run_rule(rule: Callable[..., Any], *arrays: Any) -> Any:
    if not in_user_context():
        return rule(*arrays)
    entry = _RuleOf()
    entry.frames = _frames(_source_info_context.context)
    with own_frames(entry):
        return rule(*arrays)


_run_in_own_frames = transformation2(_run_rule)

_CONVERT, _INFER = "_convert_element_type", "_infer_params"


def around_casts(make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """While a program is traced, has what `make` makes of JAX's function of a cast.

    That takes an array, a dtype and more; it returns an array that has the dtype as it
    is.
    """
    return _standing_in(_lax, _CONVERT, make)


def around_calls(make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """The same of what JAX does first where a jitted function is called in a trace.

    That takes the function as it was before, what is known of it, and its arguments as
    a tuple and a dict.
    """
    return _standing_in(_pjit, _INFER, make)

"""`jamp.autocast`: the public transform, decorator and region."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import (
    Any,
    NamedTuple,
    Never,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes
from jamp._compat import api_boundary, is_plain_array, under_trace
from jamp._emit import emit
from jamp._equations.binding import looks_for_nans
from jamp._equations.walks import equations
from jamp._errors import AutocastError, AutocastTypeError
from jamp._lowerings.processor import warn_if_slow
from jamp._plan.planner import make_plan, warn_unmatched
from jamp._policy.policy import Policy
from jamp._tracing import calls, regions
from jamp._tracing.cache_key import Programs, signature
from jamp._tracing.checks import check_function, is_array
from jamp._tracing.nnx_modules import Prepared, is_module
from jamp._tracing.options import (
    Arguments,
    Options,
    check_names,
    checked_output_dtype,
    device_kind,
    named_arguments,
    options_in_force,
    refuse_overruled,
)
from jamp._tracing.trace import in_functions, trace, wraps

# An eager program that holds one of these runs as a whole.
_AT_ONCE = frozenset({"reshard", "shard_map"})
# The attribute of a function under autocast that holds what it was made of.
_MADE = "_jamp_autocast"

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _AutocastOptions(TypedDict, total=False):
    device_type: str | None
    dtype: Any
    enabled: bool
    cache_enabled: bool
    policy: Policy | None
    output_dtype: Any


def _run(call: Prepared, options: Options, eager_programs: Programs) -> Any:
    """Runs a call under autocast; an eager one again as what it was rewritten to."""
    leaves = jax.tree.leaves((call.args, call.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    # What traces anew, as a new jax.jit does, sees what is new. A program that runs
    # again is not checked for NaN by JAX.
    once = under_trace(arrays) or looks_for_nans()
    key = None if once else signature((call.args, call.kwargs, call.behind), options)
    found = None if key is None else eager_programs.get(key)
    if found is None:
        traced = trace(call.fn, options, call.args, call.kwargs)
        plan = make_plan(traced.program, arrays, options)
        warn_unmatched(options.policy)
        if key is None or not traced.repeatable:
            return traced.rebuild(emit(plan, arrays))
        program = jax.make_jaxpr(lambda *arrays: emit(plan, arrays))(*arrays)
        # NumPy arrays of the user's may change in place by the next call.
        consts = [
            jax.numpy.array(const) if is_plain_array(jax.typeof(const)) else const
            for const in program.consts
        ]
        run = jaxpr_as_fun(program.replace(consts=consts))
        # Op by op JAX refuses derivative rules in a shard_map, and XLA some shardings.
        at_once = {eqn.primitive.name for eqn in equations(program)} & _AT_ONCE
        found = jax.jit(run) if at_once else run, traced.rebuild
        eager_programs.put(key, found)
    run, rebuild = found
    return rebuild(run(*arrays))


def _cast_outputs(result: Any, dtype: Any) -> Any:
    def converted(leaf: Any, of_function: bool) -> Any:
        if of_function or not is_array(leaf):
            return leaf
        if not jax.numpy.issubdtype(leaf.dtype, np.floating):
            return leaf
        outer = options_in_force()
        if outer is None or leaf.dtype != dtype:
            return leaf.astype(dtype)
        # It may come in another dtype than it was traced in, and a cast to this one
        # would leave no equation; here is one that leaves it as it is.
        bits = jax.numpy.finfo(dtype)
        with regions.as_written(f"output_dtype={dtype}"):
            return jax.lax.reduce_precision(leaf, bits.nexp, bits.nmant)

    if dtype is None:
        return result
    # A module is itself: its state is no result, and a copy would have its own.
    leaves, tree = jax.tree.flatten(result, is_module)
    inside = in_functions(result, is_module)
    return jax.tree.unflatten(tree, map(converted, leaves, inside))


class _Made(NamedTuple):
    """What a function under autocast was made of."""

    wrapped: Callable[..., Any]  # what it wraps, and copies of it do not
    fn: Callable[..., Any]
    arguments: Arguments
    output_dtype: Any


class Autocast:
    """A decorator, and a context manager for a region; see `autocast`."""

    def __init__(self, arguments: Arguments, output_dtype: Any) -> None:
        # Defaults wait for the call: a decorator must not make JAX look for devices.
        self._arguments = arguments
        self._output_dtype = checked_output_dtype(output_dtype)
        self._entered = threading.local()

    def __call__(self, fn: Callable[_P, _R]) -> Callable[_P, _R]:
        check_function("autocast", fn)
        if isinstance(fn, Autocast):
            raise AutocastTypeError("autocast takes a function, got an autocast")
        eager_programs = Programs()

        @wraps(fn)
        def under_autocast(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not self._arguments.enabled and options_in_force() is None:
                # As it is, on devices for which there is no policy too.
                result = fn(*args, **kwargs)
            else:
                result = self._call(fn, args, kwargs, eager_programs)
            return cast(_R, _cast_outputs(result, self._output_dtype))

        made = api_boundary(under_autocast)
        # With what it wraps: `functools.wraps` copies attributes to other functions.
        vars(made)[_MADE] = _Made(
            under_autocast, fn, self._arguments, self._output_dtype
        )
        return made

    def _call(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, eager_programs: Programs
    ) -> Any:
        options = self._arguments.options()
        if options.enabled and options.device_type == "cpu":
            warn_if_slow(options.dtype)
        if options_in_force() is not None:
            with regions.region(options, of_function=True):
                return fn(*args, **kwargs)
        call = calls.prepare(fn, args, kwargs)
        return call.finish(_run(call, options, eager_programs))

    def __reduce__(self) -> tuple[Any, ...]:
        return Autocast, (self._arguments, self._output_dtype)

    def __enter__(self) -> None:
        if self._output_dtype is not None:
            raise AutocastTypeError(
                "output_dtype is for the results of a function, which a region has "
                "none of: leave it out"
            )
        options = self._arguments.options()
        outer = options_in_force()
        if options.enabled and (outer is None or outer.run_as_written):
            raise AutocastError(
                "`with jamp.autocast(...)` acts only inside a function that "
                "jamp.autocast wraps, with enabled=True; jax.jit is not enough. Wrap "
                "the function, as in jamp.autocast(fn)(x) or @jamp.autocast above its "
                "def. Where the same code runs without autocast too, as for a module's "
                "init or in evaluation, give the region "
                "enabled=jamp.is_autocast_enabled()"
            )
        region = regions.region(options)
        region.__enter__()
        self._entered.__dict__.setdefault("regions", []).append(region)

    def __exit__(self, *exception: Any) -> None:
        self._entered.regions.pop().__exit__(*exception)


@overload
def autocast(
    fn: Callable[_P, _R], **options: Unpack[_AutocastOptions]
) -> Callable[_P, _R]: ...


@overload
def autocast(fn: None = None, **options: Unpack[_AutocastOptions]) -> Autocast: ...


def autocast(
    fn: Any = None,
    *unnamed: Never,
    device_type: str | None = None,
    dtype: Any = None,
    enabled: bool = True,
    cache_enabled: bool = True,
    policy: Policy | None = None,
    output_dtype: Any = None,
    **unknown: Never,
) -> Any:
    """Runs a function, or a region of one, in mixed precision.

    As a transform, `autocast(fn)` returns a function that computes what `fn` does with
    every operation in the dtype that the policy gives it: matmuls and convolutions in
    16 bits, sensitive operations in float32, the rest in the dtype of their operands.
    It composes with `jax.jit`, `jax.grad`, `jax.vmap` and the others. Gradients of what
    it returns, `jax.grad(autocast(fn))`, have the dtypes of the parameters.

    `fn` takes and returns any pytrees, with leaves that are no arrays too. It is traced
    once per signature, but at every call outside of `jax.jit` if it closes over JAX
    arrays, or if it is a method of an object, or gets one, whose class defines no
    `__hash__`. Results keep the dtype they were computed in.

    Also a decorator, with or without arguments, and inside a transformed function a
    context manager for a region:

        with jamp.autocast(enabled=False):
            ...  # computed as written

    Args:
      fn: the function. Left out, the call returns a decorator and context manager.
      device_type: `'gpu'` (or `'cuda'`, `'rocm'`), `'cpu'` or `'tpu'`, which chooses
        the policy; by default the backend that JAX uses.
      dtype: `jnp.float16` or `jnp.bfloat16`; by default the policy's: float16 on gpu,
        bfloat16 on cpu and tpu. With `enabled=False` it may be float32 too.
      enabled: False leaves a function as it is, and a region as written.
      cache_enabled: whether one cast of a value serves all its uses.
      policy: a `jamp.Policy` to use instead of the device's own.
      output_dtype: dtype to which floating results of `fn` are cast; None leaves them.

    Returns:
      The function under autocast; without `fn` a decorator and context manager.

    Raises:
      AutocastError: an unknown device type, a dtype that is not 16-bit floating point,
        or an enabling region outside a function under autocast.
      AutocastTypeError: `fn` is not callable, or a class; an option is unknown, of the
        wrong type or no dtype; or, at the call, a bound `flax.linen` module would
        collect variables, or a result is neither an array nor a constant.
      BannedOpError: at the call, the policy bans an operation of the program.
    """
    if unnamed:
        raise AutocastTypeError(
            "autocast takes its options by name, as in autocast(fn, device_type='cuda')"
        )
    check_names("autocast", unknown)
    arguments = Arguments(device_type, dtype, enabled, cache_enabled, policy)
    transform = Autocast(arguments, output_dtype)
    return transform if fn is None else transform(fn)


class Unwrapped(NamedTuple):
    """The function in what autocast made, and its options in an autocast around it.

    Attributes:
      fn: the function.
      arguments: its options.
      given: those given to explain or diagnose that are not None, which the program
        may still overrule; None for what autocast made, whose options are final.
      output_dtype: that of its results, if it was asked for; none of `given`.
    """

    fn: Any
    arguments: Arguments
    given: Mapping[str, Any] | None
    output_dtype: Any

    def prepare(self, args: Any, kwargs: Any) -> Prepared:
        """A call of it, with results in the dtype that they are to have."""
        returned = None
        if self.output_dtype is not None:
            returned = functools.partial(_cast_outputs, dtype=self.output_dtype)
        return calls.prepare(self.fn, args, kwargs, returned)


def unwrapped(
    function: str, fn: Any, given: Mapping[str, Any], beside: Sequence[str]
) -> Unwrapped:
    """The function in what autocast made, or the function.

    Args:
      function: what it was given to, with options by name.
      fn: the function.
      given: these options; of another function they are its own.
      beside: the names of options that it takes and autocast does not.

    Raises:
      AutocastError: another option was given than the function has.
    """
    around = named_arguments(function, given, beside)
    output_dtype = checked_output_dtype(given.get("output_dtype"))
    asked = {n: v for n, v in given.items() if v is not None and n != "output_dtype"}
    made = getattr(fn, "__dict__", {}).get(_MADE)
    if made is None or made.wrapped is not getattr(fn, "__wrapped__", None):
        return Unwrapped(fn, around, asked, output_dtype)
    own: Arguments = made.arguments
    if own.policy is None and own.device_type is None:
        own = replace(own, device_type=around.device_type, policy=around.policy)
    if asked:
        refuse_overruled(function, asked, around.options(), [own.options()])
    if output_dtype not in (None, made.output_dtype):
        raise AutocastError(
            f"{function} was given output_dtype={output_dtype}, but the function "
            f"is under autocast itself, with {made.output_dtype}: leave it out"
        )
    return Unwrapped(made.fn, own, None, made.output_dtype)


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether code at this point is traced under an enabled autocast.

    Args:
      device_type: a device type; if given, whether the autocast is for that one.

    Raises:
      AutocastError: an unknown device type.
      AutocastTypeError: `device_type` is no string.
    """
    options = options_in_force()
    kind = None if device_type is None else device_kind(device_type)
    if options is None or not options.enabled:
        return False
    return kind in (None, options.device_type)


def get_autocast_dtype(device_type: str | None = None) -> _dtypes.DType:
    """The 16-bit dtype in force at this point, or the default of a device type.

    Args:
      device_type: a device type; by default that of the autocast in force, else the
        backend that JAX uses.

    Raises:
      AutocastError: an unknown device type.
      AutocastTypeError: `device_type` is no string.
    """
    options = options_in_force()
    kind = None if device_type is None else device_kind(device_type)
    if options is None or kind not in (None, options.device_type):
        options = Arguments(kind).options()
    return options.dtype


def is_autocast_available(device_type: str) -> bool:
    """Whether there is a policy for a device type, whatever devices are attached.

    Args:
      device_type: the device type, as `autocast` takes it.

    Raises:
      AutocastTypeError: `device_type` is no string.
    """
    try:
        device_kind(device_type)
    except AutocastError:
        return False
    return True

"""Calls that run in float32, as traced; equal ones are one function for JAX.

A call of LayerNorm or softmax that runs in float32 throughout is the same few equations
in every layer. Handed to JAX as one jitted function that it inlines, they are
differentiated once and found in its caches afterwards, as they are in the program as
written. The result is the same equations. The functions are kept as long as one program
is emitted: they hold its equations, and with them what the user's code closed over.

A call that 16-bit arrays enter keeps those for the backward pass, which computes the
float32 inside anew, instead of several float32 arrays: less memory, and less to read.
What leaves it in 16 bits is cast inside of it, so that its gradient enters in 16 bits.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache, partial
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params
from jax.extend.source_info_util import current_name_stack, user_context

from jamp import _primitives
from jamp._compat import settings
from jamp._dtypes import FLOAT32, dtype_of, shape_of, size_of
from jamp._emit.conversions import widened_bits, widened_for, with_rounded_gradient
from jamp._emit.emitter import Arrays, Emitter, emits
from jamp._equations.binding import bind, checkpointed, values_of
from jamp._equations.content import content
from jamp._equations.walks import nested, read_by
from jamp._lowerings.hook import with_own_primitive
from jamp._lowerings.picks import picking
from jamp._lowerings.recomputed import recomputed
from jamp._plan.plan import Float32Call
from jamp._plan.positions import counted_columns


@emits(Float32Call)
def emit_float32_call(emitter: Emitter, action: Float32Call, arrays: Arrays) -> Arrays:
    """Emits a call; from 16-bit arrays, the backward pass runs it again."""
    low = tuple(value.low for value in action.operands[: len(action.invars)])
    known = dict(zip(action.invars, action.operands, strict=False))
    plan = action.caster.plan
    counted = tuple([counted_columns(eqn, known.get, plan) for eqn in action.eqns])
    run: Callable[..., list[Any]] = partial(_run, action, counted)
    if any(low):
        run = _recomputing(run, low, action)

    def key() -> Hashable:
        equations = content(action.invars, action.eqns, action.outvars)
        narrow = tuple(None if cast is None else cast.dtype for cast in action.narrowed)
        others = low, narrow, tuple(action.shared), action.device_type, counted
        return equations and (equations, others)

    result: list[Any] = emitter.call(run, key, arrays)
    return result


def _run(
    action: Float32Call, counted: Sequence[Sequence[int | None]], *arrays: Any
) -> list[Any]:
    unfused = _to_leave_unfused(action)
    env = dict(zip(action.invars, arrays, strict=True))
    wanted = zip(action.outvars, action.narrowed, strict=True)
    dtypes = {var: cast.dtype for var, cast in wanted if cast is not None}
    narrow = {}
    names = current_name_stack()
    for eqn, columns in zip(action.eqns, counted, strict=True):
        operands: Sequence[Any] = values_of(eqn.invars, env)
        with user_context(eqn.source_info.traceback, name_stack=names), settings(eqn):
            eqn, operands = picking(eqn, operands, columns)
            made = bind(with_own_primitive(eqn), operands)
            env.update(zip(eqn.outvars, made, strict=True))
            for var in filter(dtypes.__contains__, eqn.outvars):
                narrow[var] = jax.lax.convert_element_type(env[var], dtypes[var])
            for var in filter(unfused.__contains__, eqn.outvars):
                env[var] = _unfused(env[var])
    wide = [env[var] for var in action.outvars]
    return [*wide, *(narrow[var] for var in action.outvars if var in dtypes)]


_ELEMENT_BY_ELEMENT = (
    _primitives.TRANSCENDENTAL
    | _primitives.ARITHMETIC
    | (_primitives.MOVEMENT - _primitives.ENLARGING)
    | _primitives.CALLS.keys()
)


def _to_leave_unfused(action: Float32Call) -> frozenset[Var]:
    """What functions with numbers in them give to a reduction, or to other calls.

    XLA for CPUs computes such a function inside of the reduction that reads it, or of
    a matrix product, and for that writes each number out, as large as the array.
    """
    if action.device_type != "cpu" or not any(v.low for v in action.operands):
        return frozenset()
    readers: Counter[Var] = Counter(action.outvars)
    ends = set(action.outvars)
    numbered: set[Var] = set()
    for eqn in action.eqns:
        taken = read_by(eqn)
        readers.update(taken)
        if eqn.primitive.name in _primitives.REDUCTIONS:
            ends.update(taken)
        has_numbers = len(taken) < len(eqn.invars) or not numbered.isdisjoint(taken)
        if has_numbers or eqn.primitive.name in _primitives.CALLS:
            names = {inner.primitive.name for inner in nested([eqn])}
            numbered.update(eqn.outvars if names <= _ELEMENT_BY_ELEMENT else ())
    arrays = (v for v in numbered & ends if dtype_of(v) == FLOAT32 and shape_of(v))
    return frozenset(var for var in arrays if readers[var] == 1)


@jax.custom_jvp
def _unfused(array: Any) -> Any:
    """The array itself; of what is differentiated, computed by no reduction or product.

    Otherwise nothing is gained: in float32, too, XLA would compute it there.
    """
    return array


@_unfused.defjvp
def _unfused_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # Float32 has no more bits than these, which XLA does not notice. That of JAX 0.10
    # drops barriers before it forms reductions.
    return jax.lax.reduce_precision(primals[0], 8, 24), tangents[0]


# With more, as of the levels of an associative scan, a GPU takes many passes.
_FEW_PADS = 8
# Elements of a sum whose roundings change it by less than a sixteenth of one.
_MANY = 256
# What is worth saving: it takes a pass to compute, or a sort.
_SAVED = _primitives.REDUCTIONS | _primitives.ORDERS
_CHOOSING = frozenset({"reduce_max", "reduce_min"})


def _saved(eqns: Sequence[JaxprEqn], outvars: Collection[Any]) -> frozenset[str]:
    """What a call saves for its backward pass, by the names of primitives.

    The gradient of a maximum goes to the elements that are equal to it: to those that
    the backward pass has, if it is computed from them.
    """
    return _SAVED - _CHOOSING if _chooses(eqns, outvars) else _SAVED


def _chooses(eqns: Sequence[JaxprEqn], outvars: Collection[Any]) -> bool:
    """Whether gradients go through a maximum to the elements that are equal to it."""
    differentiated = {v for v in outvars if not isinstance(v, Literal)}
    for eqn in reversed(eqns):
        if differentiated.isdisjoint(eqn.outvars):
            continue
        programs = [*jaxprs_in_params(eqn.params)]
        inside = any(_chooses(program.eqns, program.outvars) for program in programs)
        if inside or eqn.primitive.name in _CHOOSING:
            return True
        if eqn.primitive.name != "stop_gradient":
            differentiated.update(read_by(eqn))
    return False


@cache
def _saving(saved: frozenset[str]) -> Callable[..., bool]:
    """The policy of checkpoints that save what some primitives give.

    It is one object for JAX, which compares what it has seen before by it.
    """
    return lambda primitive, *operands, **params: str(primitive) in saved


def _saves_few(eqn: JaxprEqn, saved: Collection[str]) -> bool:
    """Whether a result is saved that the rounding of its operand moves noticeably.

    In a sum of many elements the roundings average out.
    """
    if eqn.primitive.name != "reduce_sum":
        return eqn.primitive.name in saved
    shape = shape_of(eqn.invars[0])
    count = size_of(shape[axis] for axis in eqn.params["axes"])
    return count is None or count < _MANY


def _recomputing(
    run: Callable[..., list[Any]], low: Sequence[bool], action: Float32Call
) -> Callable[..., list[Any]]:
    """A call that the backward pass runs again, from arrays some of which are low.

    An associative scan is not, on GPUs: it is kept as float32 keeps it.

    Barriers keep XLA from sharing it with the forward pass. On GPUs it computes cheap
    functions again without them; of others only the 16 bits are behind one.
    """
    eqns = [*nested(action.eqns)]
    names = {eqn.primitive.name for eqn in eqns}
    costly = not names.isdisjoint(_primitives.TRANSCENDENTAL)
    saved = _saved(action.eqns, action.outvars)
    saves = any(_saves_few(eqn, saved) for eqn in eqns)
    round_gradient = costly and names.isdisjoint(_primitives.REDUCTIONS)
    on_cpu = action.device_type == "cpu"
    barred = costly and not on_cpu

    def widened(array: Any, wide: Any) -> Any:
        array = recomputed(array) if barred else array
        if wide is not None:
            return widened_for(saves, array, wide)
        if saves:
            return _in_float32(array)
        if round_gradient:
            array = with_rounded_gradient(array.dtype, array)
        return jax.lax.convert_element_type(array, FLOAT32)

    def widen_and_run(*arrays: Any) -> Any:
        casts = dict(zip(action.shared, arrays[len(low) :], strict=True))
        taken = enumerate(zip(arrays, low, strict=False))
        return run(
            *(widened(a, casts.get(i)) if is_low else a for i, (a, is_low) in taken)
        )

    pads = sum(eqn.primitive.name == "pad" for eqn in eqns)
    if pads > _FEW_PADS and not on_cpu:
        return widen_and_run
    policy = _saving(saved)
    return checkpointed(widen_and_run, policy=policy, prevent_cse=on_cpu)


@jax.custom_jvp
def _in_float32(low: Any) -> Any:
    """The cast of an array; of which sums are saved that belong to its 16 bits."""
    return jax.lax.convert_element_type(low, FLOAT32)


@_in_float32.defjvp
def _in_float32_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return widened_bits(*primals), jax.lax.convert_element_type(tangents[0], FLOAT32)

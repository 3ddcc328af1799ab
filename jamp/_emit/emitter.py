"""The loop over a plan's actions, and those that are one binding or conversion."""

import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, repeat
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import current_name_stack, user_context

from jamp import _dtypes
from jamp._compat import (
    INLINE,
    becomes_a_program,
    in_user_context,
    only_staged,
    settings,
)
from jamp._emit.conversions import (
    convert,
    convert_all,
    widened_for,
    with_rounded_gradient,
)
from jamp._emit.loop_stacks import Iteration
from jamp._emit.recurring import recurs, run_as_before
from jamp._equations.binding import bind_primitive
from jamp._equations.content import constant_key, is_key
from jamp._lowerings.hook import bound_as
from jamp._lowerings.picks import picking
from jamp._plan.plan import (
    Action,
    Bind,
    Broadcast,
    Cast,
    Float32Call,
    Plan,
    RoundedGradient,
    Structural,
)
from jamp._plan.positions import counted_columns
from jamp._plan.values import Value
from jamp._policy.rules import Rule
from jamp._tracing.locations import location

Arrays = Sequence[Any]
Places = Collection[int]  # of operands
Emission = Callable[["Emitter", Any, Arrays], Arrays]
# It is told too which operands vary, as `Emitter.run` is.
ProgramsEmission = Callable[["Emitter", Structural, Arrays, Places], Arrays]

_emissions: dict[type[Action], Emission] = {}
_programs_emissions: dict[str, ProgramsEmission] = {}


def emits(kind: type[Action]) -> Callable[[Emission], Emission]:
    """Registers what emits a kind of action."""
    return partial(_register, _emissions, [kind])


def emits_programs(*kinds: str) -> Callable[[ProgramsEmission], ProgramsEmission]:
    """Registers what emits equations of some primitives that hold programs."""
    return partial(_register, _programs_emissions, kinds)


def _register(registry: dict[Any, Any], kinds: Iterable[Any], emission: Any) -> Any:
    for kind in kinds:
        if kind in registry:
            raise ValueError(f"{kind} is emitted already: {registry[kind].__name__}")
        registry[kind] = emission
    return emission


def emit(plan: Plan, arrays: Sequence[Any], *, share: bool = True) -> list[Any]:
    return Emitter(share).run(plan, arrays)


class Made:
    """What was made for a key, the first time."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave for this key; without a key it is made anew."""
        if not is_key(key):
            return make()
        found = self._made.get(key)  # a key may be long, and is hashed each time
        if found is None:
            found = self._made[key] = make()
        return found


class Emitter:
    """Emits one program. Nothing that JAX keeps may keep it: see `emitter_of`."""

    def __init__(self, share: bool, rules: Made | None = None) -> None:
        # Whether equal calls are one function, which has the lines of one of them.
        self.share = share
        # What the derivative rules of equal calls have in common, as written.
        self.rules = Made() if rules is None else rules
        # Programs, and jitted functions, by what they compute.
        self._programs = Made()
        self._functions = Made()

    def run(
        self,
        plan: Plan,
        arrays: Sequence[Any],
        varying: Places = (),
        wide: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """The results of a plan.

        Args:
          plan: the plan.
          arrays: its inputs, and what they are cast to.
          varying: the places of inputs of which a loop has others in each iteration, if
            what it saves of these is to be float32.
          wide: of some inputs in 16 bits, by place, a float32 cast that was made
            outside: what widens such an input here sends its gradient to that cast.
        """
        given = plan.arguments
        shared = {given[place].number: array for place, array in wide.items()}
        env = {v.number: array for v, array in zip(given, arrays, strict=True)}
        iteration = Iteration(given[place] for place in varying)

        def read(value: Value) -> Any:
            return env[value.number] if value.array is None else value.array

        # What runs op by op lets go of each array as soon as nothing reads it.
        unread: Iterable[Sequence[int]] = repeat(())
        if not becomes_a_program():
            unread = plan.unread
        steps = zip(plan.actions, unread, strict=False)
        for lineage, found in groupby(steps, lambda step: step[0].lineage):
            with _source_of(*lineage) if lineage else nullcontext():
                for action, numbers in found:
                    taken = [read(value) for value in action.operands]
                    if isinstance(action, Bind | Structural):
                        action = _keeping(action, plan)
                    if shared:
                        action, taken = _sharing(action, taken, shared)
                    made = self._emit(action, taken, iteration)
                    for value, array in zip(action.results, made, strict=True):
                        env[value.number] = array
                    for number in numbers:
                        env.pop(number, None)
        return [read(value) for value in plan.results]

    def _emit(self, action: Action, arrays: list[Any], iteration: Iteration) -> Arrays:
        varying = iteration.varying(action)
        taken = iteration.saved(action, arrays, varying) if varying else arrays
        if isinstance(action, Structural):
            made = self._emit_programs(action, taken, varying)
        else:
            made = _emissions[type(action)](self, action, taken)
        return iteration.made(action, made) if varying else made

    def _emit_programs(
        self, action: Structural, arrays: Arrays, varying: Places
    ) -> Arrays:
        emission = _programs_emissions[action.kind]
        if not recurs(action):
            return emission(self, action, arrays, varying)
        # What is kept keeps the rules of an emitter of its own, and none of others.
        own = Emitter(self.share)

        def run(*arrays: Any) -> Arrays:
            return emission(own, action, [*arrays], varying)

        return run_as_before(action.eqn, run, arrays)

    def call(
        self,
        function: Callable[..., Any],
        key: Callable[[], Hashable],
        arrays: Sequence[Any],
    ) -> Any:
        """Calls a function, which is one for JAX with those that have an equal key.

        JAX differentiates it once, and finds it in its caches afterwards, as it does
        the functions of jax.numpy. The equations are the same. Without a key, which is
        asked for where functions are shared alone, it is called as it is.
        """
        # Outside of a program JAX would compile each of these functions, once a call.
        found = key() if self.share and becomes_a_program() else None
        if not is_key(found):
            return function(*arrays)
        make = partial(jax.jit, function, inline=INLINE)
        return self._functions.once(found, make)(*arrays)

    def closed(
        self,
        plan: Plan,
        arrays: Sequence[Any],
        *,
        into: Any = None,
        varying: Places = (),
        wide: Mapping[int, Any] = MappingProxyType({}),
    ) -> Any:
        """The closed jaxpr of an inner plan, the same one wherever it is the same.

        It is for inputs and extras like these arrays, and after them float32, as in
        `run`. It has results in the dtypes `into`, if they are others than planned.
        """
        avals, wides = (tuple(map(jax.typeof, a)) for a in (arrays, wide.values()))
        dtypes = tuple(plan.result_dtypes if into is None else into)

        def run(arrays: Sequence[Any], wides: Sequence[Any]) -> list[Any]:
            casts = dict(zip(wide, wides, strict=True))
            if not varying:
                # They may be wider than planned, for a loop around that saves them so.
                arrays = convert_all(arrays, [value.dtype for value in plan.arguments])
            return convert_all(self.run(plan, arrays, varying, casts), dtypes)

        key = plan, avals, wides, dtypes, tuple(wide), tuple(varying)
        return self._programs.once(key, lambda: jax.make_jaxpr(run)(avals, wides))


def emitter_of(emitter: Emitter) -> Callable[[], Emitter]:
    """Gives an emitter while it emits; later one of the same rules, for one rule.

    JAX keeps rules as long as a function is alive, in caches by that function. A rule
    that kept the emitter, whose functions are such too, would be kept for ever, and
    with it what the user's code closed over.
    """
    share, rules, alive = emitter.share, emitter.rules, weakref.ref(emitter)
    return lambda: alive() or Emitter(share, rules)


@contextmanager
def _source_of(eqn: JaxprEqn, *inside: JaxprEqn) -> Iterator[None]:
    """Gives what is emitted the source, scopes and settings of nested equations."""
    names = current_name_stack() + eqn.source_info.name_stack
    # A rule of a library's has no line of the user's own but that of its call.
    called = in_user_context() and location(eqn) is None
    traceback = None if called else eqn.source_info.traceback
    with user_context(traceback, name_stack=names), settings(eqn):
        with _source_of(*inside) if inside else nullcontext():
            yield


def _keeping(action: Bind | Structural, plan: Plan) -> Action:
    """An action that gives away nothing that others read, which may be moved behind it.

    Nor does it give away constants, which are there when the plan runs again, and casts
    that its caller made.
    """
    params = action.eqn.params
    if not any(params.get("donated_invars", ())):
        return action
    numbers = [value.number for value in action.operands]
    lent = {value.number for value in plan.extras.values()}
    twice = {number for number, count in Counter(numbers).items() if count > 1}
    free = {*plan.unread[plan.actions.index(action)]} - lent - twice
    donated = tuple(
        asked and value.array is None and value.number in free
        for asked, value in zip(params["donated_invars"], action.operands, strict=False)
    )
    eqn = action.eqn.replace(params={**params, "donated_invars": donated})
    return replace(action, eqn=eqn)


def _sharing(
    action: Action, arrays: list[Any], wide: Mapping[int, Any]
) -> tuple[Action, list[Any]]:
    """An action whose gradients of what it widens go to some float32, by number."""
    if not isinstance(action, Cast | Float32Call | Structural):
        return action, arrays
    places = [
        place
        for place in action.widens
        if action.operands[place].number in wide and place not in action.shared
    ]
    if not places:
        return action, arrays
    casts = [wide[action.operands[place].number] for place in places]
    shared = [*action.shared, *places]
    return replace(action, shared=shared), [*arrays, *casts]


@emits(Cast)
def _emit_cast(emitter: Emitter, action: Cast, arrays: Arrays) -> Arrays:
    if action.shared:
        return [widened_for(False, *arrays)]
    return [convert(arrays[0], action.dtype)]


@emits(Broadcast)
def _emit_broadcast(emitter: Emitter, action: Broadcast, arrays: Arrays) -> Arrays:
    shape = action.results[0].aval.shape
    dimensions = range(len(shape) - jax.numpy.ndim(arrays[0]), len(shape))
    return [jax.lax.broadcast_in_dim(arrays[0], shape, dimensions)]


@emits(RoundedGradient)
def _emit_rounded_gradient(
    emitter: Emitter, action: RoundedGradient, arrays: Arrays
) -> Arrays:
    return [with_rounded_gradient(action.dtype, arrays[0])]


@emits(Bind)
def _emit_bind(emitter: Emitter, action: Bind, arrays: Arrays) -> Arrays:
    eqn = action.eqn
    as_traced = action.caster.record.ruling.rule is Rule.AS_TRACED
    if not as_traced:
        values = action.operands
        counted = counted_columns(
            eqn, lambda var: values[action.eqn.invars.index(var)], action.caster.plan
        )
        eqn, arrays = picking(eqn, arrays, counted)
    primitive, params = eqn.primitive, eqn.params
    if action.operand_dtypes is not None:
        avals = _dtypes.all_in_dtypes(eqn.invars, action.operand_dtypes)
        to = action.results[0].dtype
        primitive, params = bound_as(eqn, avals, action.weights, action.rounded, to)
    if as_traced or eqn.effects or only_staged(arrays):
        return bind_primitive(primitive, params, arrays)
    # Scalars are no operands of a function, which would be saved for its derivative.
    fixed = [None if isinstance(a, jax.Array) or np.ndim(a) else a for a in arrays]

    def run(*rest: Any) -> list[Any]:
        taken = iter(rest)
        operands = [next(taken) if scalar is None else scalar for scalar in fixed]
        return bind_primitive(primitive, params, operands)

    def key() -> Hashable:
        scalars = tuple([None if a is None else constant_key(a) for a in fixed])
        return primitive, tuple(params.items()), eqn.ctx, scalars

    rest = [a for a, scalar in zip(arrays, fixed, strict=True) if scalar is None]
    results: Arrays = emitter.call(run, key, rest)
    return results

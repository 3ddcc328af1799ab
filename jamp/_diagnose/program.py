"""The program that is diagnosed: a function under autocast, perhaps its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import current_name_stack
from jax.ref import AbstractRef

from jamp._diagnose.measure import Pair, State, state_of
from jamp._diagnose.paths import (
    ModulePaths,
    Path,
    find_paths,
    in_module,
    label_of,
)
from jamp._emit import emit
from jamp._equations import equations
from jamp._errors import AutocastError, AutocastTypeError
from jamp._plan.planner import make_plan
from jamp._tracing import nnx_modules, origin, regions, trace
from jamp._tracing.regions import Options

Line = tuple[str, int]


@dataclass(frozen=True)
class Settings:
    """How a program is run: what a suggestion may change.

    Attributes:
      options: those of the autocast.
      loss_scale: the factor of the loss; None computes no gradient.
      regions: lines of the user's that stand in a region with `enabled=False`.
    """

    options: Options
    loss_scale: float | None = None
    regions: frozenset[Line] = frozenset()


@dataclass(frozen=True)
class Subject:
    """A function and its arguments.

    Attributes:
      fn: the function, of arrays where the user's has modules.
      leaves: leaves of its arguments.
      tree: their structure.
      labels: what the leaves are called.
      differentiated: which leaves the gradient is taken of.
      has_aux: whether it returns more than the loss.
      modules: the paths of the modules whose state it returns too.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    labels: list[str]
    differentiated: tuple[int, ...]
    has_aux: bool
    modules: ModulePaths

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: int | Sequence[int],
        has_aux: bool,
    ) -> Subject:
        """The subject of a call; without a gradient, `argnums` is empty.

        Raises:
          AutocastError: there is no argument at `argnums`.
          AutocastTypeError: no argument holds an array, or one holds no values.
        """
        free = len(args)
        fn, args, kwargs = nnx_modules.unwrap(fn, args, kwargs)
        call = nnx_modules.prepare(fn, args, kwargs)
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        arrays = [leaf for leaf in leaves if trace.is_array(leaf)]
        if not arrays:
            raise AutocastTypeError("diagnose runs the function: give it some arrays")
        if any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in arrays):
            raise AutocastTypeError(
                "diagnose runs the function on arrays with values; call it outside of "
                "jax.jit and other transformations"
            )
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not all(-free <= number < free for number in chosen):
            raise AutocastError(
                f"argnums is {argnums}, and there are {free} positional arguments"
            )
        # Those that the partials hold come first.
        chosen = tuple(len(args) - free + number % free for number in chosen)
        paths, modules = find_paths(args, kwargs, call)
        differentiated = tuple(
            slot
            for slot, path in enumerate(paths)
            if path[0] == "args"
            and path[1].idx in chosen
            and _is_floating(leaves[slot])
        )
        labels = list(map(label_of, paths))
        return cls(call.fn, leaves, tree, labels, differentiated, has_aux, modules)

    def not_finite(self) -> list[str]:
        """The arguments that hold what is not finite."""
        return [
            label
            for label, leaf in zip(self.labels, self.leaves, strict=True)
            if _is_floating(leaf) and not jax.numpy.isfinite(leaf).all()
        ]


def _is_floating(leaf: Any) -> bool:
    return trace.is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, np.floating)


@dataclass(frozen=True)
class Program:
    """A subject, traced and rewritten under some settings.

    Attributes:
      closed: the closed jaxpr.
      arrays: its arguments; the last one is the loss scale, if there is one.
      labels: names of its results.
      gradients: how many of the results, the last ones, are gradients.
    """

    closed: Any
    arrays: list[Any]
    labels: list[str]
    gradients: int


def make_program(subject: Subject, settings: Settings) -> Program:
    """Traces a subject under some settings.

    Raises:
      AutocastError: a gradient is asked for, and the function returns no scalar loss.
    """
    slots = [i for i, leaf in enumerate(subject.leaves) if trace.is_array(leaf)]
    arrays = [subject.leaves[slot] for slot in slots]
    labels: list[str] = []

    def call(leaves: list[Any]) -> Any:
        args, kwargs = jax.tree.unflatten(subject.tree, leaves)
        traced = trace.trace(subject.fn, settings.options, args, kwargs)
        _refuse_refs(traced.program)
        marked = _in_regions(traced.program, settings)
        inputs = [leaves[slot] for slot in slots]
        plan = make_plan(marked, inputs, settings.options)
        return traced.rebuild(emit(plan, inputs))

    def labelled(**parts: Any) -> list[Any]:
        found = [
            (_label(name, path, subject), leaf)
            for name, part in parts.items()
            for path, leaf in jax.tree.leaves_with_path(part)
            if trace.is_array(leaf)
        ]
        labels.extend(label for label, _ in found)
        return [leaf for _, leaf in found]

    def results(*arrays: Any) -> list[Any]:
        leaves = trace.with_arrays(subject.leaves, slots, arrays)
        result, state = _parted(call(leaves), subject)
        return labelled(result=result, state=state)

    chosen = subject.differentiated

    def gradients(*arrays: Any) -> list[Any]:
        *inputs, scale = arrays
        leaves = trace.with_arrays(subject.leaves, slots, inputs)

        def loss_of(parameters: list[Any]) -> Any:
            return _split(call(trace.with_arrays(leaves, chosen, parameters)), subject)

        parameters = [leaves[slot] for slot in chosen]
        loss, pullback, (aux, state) = jax.vjp(loss_of, parameters, has_aux=True)
        found = pullback(scale.astype(loss.dtype))[0]
        values = labelled(loss=loss, aux=aux, state=state)
        labels.extend(f"gradient of {subject.labels[i]}" for i in chosen)
        return [*values, *found]

    if settings.loss_scale is None:
        return Program(jax.make_jaxpr(results)(*arrays), arrays, labels, 0)
    if not chosen:
        raise AutocastTypeError(
            "diagnose(fn, loss_scale=...) takes the gradient of the floating arrays "
            "among the arguments at argnums, and there are none"
        )
    arrays.append(np.float32(settings.loss_scale))
    closed = jax.make_jaxpr(gradients)(*arrays)
    return Program(closed, arrays, labels, len(chosen))


def _label(name: str, path: Path, subject: Subject) -> str:
    """What a part of a result of this name is called."""
    if name == "state":
        return f"state of {label_of(in_module(path, subject.modules or {}))}"
    return name + jax.tree_util.keystr(path)


def _parted(result: Any, subject: Subject) -> tuple[Any, Any]:
    """What the user's function returns, and the state of modules."""
    return (result, ()) if subject.modules is None else result


def _split(result: Any, subject: Subject) -> tuple[Any, Any]:
    """The loss, and what else a function returns."""
    result, state = _parted(result, subject)
    if subject.has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise AutocastTypeError(
            "diagnose(fn, has_aux=True) needs a function that returns a pair of the "
            f"loss and something else, got {_described(result)}"
        )
    loss, aux = result if subject.has_aux else (result, ())
    if not (_is_floating(loss) and loss.ndim == 0):
        raise AutocastError(
            "diagnose(fn, loss_scale=...) needs a function that returns a scalar loss "
            f"(with has_aux=True, first of a pair), got {_described(loss)}"
        )
    return loss, (aux, state)


def _described(value: Any) -> str:
    if not trace.is_array(value):
        return type(value).__name__
    return f"an array of shape {value.shape} and dtype {value.dtype}"


def _refuse_refs(program: Any) -> None:
    """Raises where a program reads or writes mutable arrays; kernels may, inside."""
    inside = equations(program, lambda eqn: eqn.primitive.name != "pallas_call")
    atoms = (atom for eqn in inside for atom in (*eqn.invars, *eqn.outvars))
    if any(isinstance(a.aval, AbstractRef) for a in (*program.jaxpr.invars, *atoms)):
        raise AutocastTypeError(
            "diagnose cannot follow mutable arrays (jax.new_ref): it runs all "
            "operations twice; give it a function without them"
        )


def _in_regions(program: Any, settings: Settings) -> Any:
    """A traced program in which some lines stand in a disabled region."""
    if not settings.regions:
        return program
    region: AbstractContextManager[None] = regions.region(
        replace(settings.options, enabled=False)
    )
    with region:
        mark = current_name_stack()

    def marked(value: Any) -> Any:
        # Since JAX 0.12 a closed jaxpr is a jaxpr.
        if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:
            return value.replace(jaxpr=marked(value.jaxpr))
        if isinstance(value, Jaxpr):
            return value.replace(eqns=list(map(marked_equation, value.eqns)))
        if isinstance(value, (tuple, list)) and any(map(is_program, value)):
            return type(value)(map(marked, value))
        return value

    def is_program(value: Any) -> bool:
        return isinstance(value, (ClosedJaxpr, Jaxpr))

    def marked_equation(eqn: Any) -> Any:
        location, info = origin.location(eqn), eqn.source_info
        if location is not None and (location.file, location.line) in settings.regions:
            info = info.replace(name_stack=info.name_stack + mark)
        params = {name: marked(value) for name, value in eqn.params.items()}
        return eqn.replace(source_info=info, params=params)

    return marked(program)


@dataclass(frozen=True)
class Outcome:
    """A result of the program, or a gradient, in two runs.

    Attributes:
      label: what it is.
      gradient: whether it is a gradient.
      state: how far it is from float32's.
      power: its sum of squares in float32.
      shadow: it in float32.
      producers: the outputs that it came from.
    """

    label: str
    gradient: bool
    state: State
    power: float
    shadow: Any = field(repr=False)
    producers: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        label: str,
        gradient: bool,
        pair: Pair,
        producers: frozenset[int] = frozenset(),
    ) -> Outcome:
        """Compares a result in two runs."""
        shadow = np.asarray(pair.shadow)
        finite = shadow[np.isfinite(shadow)].astype(np.float64)
        power = float(np.sum(np.square(finite)))
        return cls(label, gradient, state_of(pair), power, shadow, producers)

    @property
    def error(self) -> float:
        """Its relative error; inf if it is not finite."""
        state = self.state
        return math.inf if state.overflowed or state.wild else state.error

    @property
    def mean(self) -> float:
        """Its root mean square in float32."""
        return math.sqrt(self.power / max(self.shadow.size, 1))

    def against(self, computed: Any, factor: float) -> Outcome:
        """What a program with another loss scale computed, beside the same float32."""
        shadow = self.shadow * np.float32(factor if self.gradient else 1.0)
        pair = Pair(np.asarray(computed), shadow)
        return Outcome.of(self.label, self.gradient, pair)

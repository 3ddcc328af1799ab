"""The program that is diagnosed: a function under autocast, perhaps its gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.extend.source_info_util import current_name_stack
from jax.ref import AbstractRef

from jamp._autocast import Unwrapped
from jamp._emit import emit
from jamp._emit.conversions import convert_all
from jamp._equations.walks import atoms, equations, replaced
from jamp._errors import AutocastError, AutocastTypeError
from jamp._plan.planner import make_plan
from jamp._tracing import calls, locations, regions, trace
from jamp._tracing.checks import is_array, wrong_loss
from jamp._tracing.nnx_graph import Slot, spelled_out
from jamp._tracing.nnx_modules import Prepared
from jamp._tracing.options import Options, tracing

Form = Literal["rewritten", "by itself", "as written"]
# The keys that lead to a leaf, the first one `args` or `kwargs`.
Path = tuple[Any, ...]
# The parts of what a program returns; with a gradient, the first one is the loss.
_RESULT, _AUX, _STATE, _GRADIENT = range(4)


@dataclass(frozen=True)
class Settings:
    options: Options  # those of the autocast
    loss_scale: float | None = None  # the factor of the loss; None computes no gradient
    # Whose lines stand in a region with `enabled=False`.
    regions: frozenset[locations.Location] = frozenset()


@dataclass(frozen=True)
class Program:
    """A subject, traced and rewritten under some settings."""

    closed: Any  # the closed jaxpr
    arrays: list[Any]  # its arguments; the last one is the loss scale, if there is one
    labels: list[str]  # names of its results, of which the gradients are the last


@dataclass(frozen=True)
class Subject:
    """A call that is diagnosed: a function, and its arguments as leaves."""

    fn: Callable[..., Any]  # the function, of arrays where the user's has modules
    leaves: list[Any]  # leaves of its arguments
    tree: Any  # their structure
    labels: list[str]  # what the leaves are called
    differentiated: tuple[int, ...]  # which leaves the gradient is taken of
    has_aux: bool  # whether it returns more than the loss
    # Paths of modules and variables that it may change, by number; None without any.
    objects: Mapping[int, Path] | None

    @classmethod
    def of(
        cls,
        inner: Unwrapped,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
        has_aux: bool,
    ) -> Self:
        """The subject of a call; without a gradient, `argnums` is empty."""
        free = len(args)
        fn, args, kwargs = calls.without_partials(inner.fn, args, kwargs)
        call = inner._replace(fn=fn).prepare(args, kwargs)
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        if not arrays:
            raise AutocastTypeError("diagnose runs the function: give it some arrays")
        if any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in arrays):
            raise AutocastTypeError(
                "diagnose runs the function on arrays with values, not on shapes as of "
                "jax.eval_shape; call it outside of jax.jit and other transformations"
            )
        if not all(-free <= number < free for number in argnums):
            raise AutocastError(
                f"argnums is {', '.join(map(str, argnums))}, and there are {free} "
                "positional arguments"
            )
        # Those that the partials hold come first.
        chosen = tuple(len(args) - free + number % free for number in argnums)
        paths, objects = _find_paths(args, kwargs, call)
        differentiated = tuple(
            slot
            for slot, path in enumerate(paths)
            if path[0].key == "args"
            and path[1].idx in chosen
            and _is_floating(leaves[slot])
        )
        labels = list(map(_label_of, paths))
        return cls(call.fn, leaves, tree, labels, differentiated, has_aux, objects)

    def options(self, inner: Unwrapped) -> Options:
        """Options around it, of which it may decide itself unless they are its own."""
        options = inner.arguments.options()
        if inner.given is None:
            return options
        args, kwargs = jax.tree.unflatten(self.tree, self.leaves)
        program = trace.trace(self.fn, options, args, kwargs).program
        return regions.options_around("diagnose", inner.given, options, program)

    def not_finite(self) -> list[str]:
        return [
            label
            for label, leaf in zip(self.labels, self.leaves, strict=True)
            if _is_floating(leaf) and not jax.numpy.isfinite(leaf).all()
        ]

    @property
    def weights(self) -> list[int]:
        """Which of a program's arrays the gradient is taken of."""
        slots = self._slots()
        return [slots.index(slot) for slot in self.differentiated]

    def _slots(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if is_array(leaf)]

    def program(self, settings: Settings, form: Form = "rewritten") -> Program:
        """It under some settings; or as it runs without any; or without autocast."""
        slots = self._slots()
        arrays, chosen = [self.leaves[slot] for slot in slots], self.differentiated

        def call(leaves: list[Any]) -> Any:
            """What the user's function returns, and the state of modules."""
            args, kwargs = jax.tree.unflatten(self.tree, leaves)
            if form == "by itself":
                result = self.fn(*args, **kwargs)
            else:
                traced = trace.trace(self.fn, settings.options, args, kwargs)
                inputs = [leaves[slot] for slot in slots]
                way = _run_as_written if form == "as written" else _run_rewritten
                result = traced.rebuild(way(traced.program, inputs, settings))
            return (result, ()) if self.objects is None else spelled_out(*result)

        def run(*arrays: Any) -> Any:
            leaves = trace.with_arrays(self.leaves, slots, arrays[: len(slots)])
            if settings.loss_scale is None:
                result, state = call(leaves)
                return _only_arrays((result, (), state, ()))

            def loss_of(parameters: list[Any]) -> Any:
                result, state = call(trace.with_arrays(leaves, chosen, parameters))
                loss, aux = _loss_and_aux(result, self.has_aux)
                return loss, _only_arrays((aux, state))

            parameters = [leaves[slot] for slot in chosen]
            loss, pullback, aux = jax.vjp(loss_of, parameters, has_aux=True)
            return loss, *aux, pullback(arrays[-1].astype(loss.dtype))[0]

        def label_of(path: Path) -> str:
            part, inside = path[0].idx, path[1:]
            if part == _GRADIENT:
                return f"gradient of {self.labels[chosen[inside[0].idx]]}"
            if part == _STATE:
                return f"state of {_label_of(_in_module(inside, self.objects or {}))}"
            name = "result" if settings.loss_scale is None else ("loss", "aux")[part]
            return name + jax.tree_util.keystr(inside)

        if settings.loss_scale is not None:
            if not chosen:
                raise AutocastTypeError(
                    "diagnose(fn, loss_scale=...) takes the gradient of the floating "
                    "arrays among the arguments at argnums, and there are none"
                )
            arrays.append(np.float32(settings.loss_scale))
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*arrays)
        labels = [label_of(path) for path, _ in jax.tree.leaves_with_path(shapes)]
        return Program(closed, arrays, labels)


def _run_as_written(program: Any, arrays: list[Any], settings: Settings) -> Any:
    del settings
    # Those of 16 bits may have been traced as if they had more.
    dtypes = [aval.dtype for aval in program.in_avals]
    return jaxpr_as_fun(program)(*convert_all(arrays, dtypes))


def _run_rewritten(program: Any, arrays: list[Any], settings: Settings) -> Any:
    _refuse_refs(program)
    plan = make_plan(_in_regions(program, settings), arrays, settings.options)
    return emit(plan, arrays, share=False)


def _only_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def _is_floating(leaf: Any) -> bool:
    return is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, np.floating)


def _find_paths(
    args: Any, kwargs: Any, call: Prepared
) -> tuple[list[Path], Mapping[int, Path] | None]:
    """The user's path of each leaf of a prepared call, and of what it may change."""
    _, state, held = call.args if call.packed else (None, (), (args, kwargs))
    given = jax.tree.leaves_with_path({"args": held[0], "kwargs": held[1]})
    # A module's number stands in its place.
    slots = ((path, leaf) for path, leaf in given if isinstance(leaf, Slot))
    modules = {int(leaf): path for path, leaf in slots}
    inside = [_in_module(path, modules) for path, _ in jax.tree.leaves_with_path(state)]
    paths = [*inside, *(path for path, _ in given)]
    if not call.packed:
        return paths, None
    objects = {
        number: _in_module(tuple(map(jax.tree_util.DictKey, path)), modules)
        for number, path in call.paths().items()
    }
    return paths, objects


def _in_module(path: Path, modules: Mapping[int, Path]) -> Path:
    # Other modules are the function itself, or it is bound to them or closes over them.
    module = modules.get(path[0].key, (jax.tree_util.DictKey("module"), path[0]))
    # The last key leads into a variable.
    value = jax.tree_util.GetAttrKey("value")
    return (*module, *(key for key in path[1:] if key != value))


def _label_of(path: Path) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    wrong = wrong_loss(result, has_aux)
    if wrong:
        raise AutocastTypeError(f"diagnose(fn, loss_scale=...): {wrong}")
    loss, aux = result if has_aux else (result, ())
    if not is_array(loss):
        raise AutocastTypeError(
            f"diagnose(fn, loss_scale=...): the loss is the number {loss}, which has "
            "no gradient"
        )
    return loss, aux


def _refuse_refs(program: Any) -> None:
    """Raises where a program reads or writes mutable arrays; kernels may, inside."""
    inside = equations(program, lambda eqn: eqn.primitive.name != "pallas_call")
    every = (*program.jaxpr.invars, *atoms(inside))
    if any(isinstance(atom.aval, AbstractRef) for atom in every):
        raise AutocastTypeError(
            "diagnose cannot follow mutable arrays (jax.new_ref): it runs all "
            "operations twice; give it a function without them"
        )


def _in_regions(program: Any, settings: Settings) -> Any:
    """A traced program in which some lines stand in a disabled region."""
    if not settings.regions:
        return program
    lines = {(region.file, region.line) for region in settings.regions}
    options = settings.options
    with tracing(options), regions.region(replace(options, enabled=False)):
        mark = current_name_stack()

    def on_line(eqn: JaxprEqn) -> bool:
        location = locations.location(eqn)
        return location is not None and (location.file, location.line) in lines

    def marked(eqn: JaxprEqn) -> Any:
        info = eqn.source_info
        return eqn.replace(source_info=info.replace(name_stack=info.name_stack + mark))

    return replaced(program, on_line, marked, {})

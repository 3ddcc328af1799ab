"""Scans with their programs as planned, and what is made before and behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import get_abstract_mesh

from jamp import _dtypes
from jamp._compat import is_plain_array, scan_counts
from jamp._emit.backward_loops import LoopBack, loop_back
from jamp._emit.before_loops import Split, differentiated_as, split
from jamp._emit.conversions import convert, convert_all, narrowed
from jamp._emit.emitter import Arrays, Emitter, Places, emits_programs, emitter_of
from jamp._emit.loop_stacks import stackable, stacks_in_float32
from jamp._emit.loop_weights import Behind, Moved
from jamp._plan.plan import Plan, Structural


@emits_programs("scan")
def emit_scan(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (plan,), parts, loop = action.plans, split(action), _Loop.of(action)
    if parts is None:
        return _run_back(emitter, loop, plan, arrays, loop_back(action))
    if parts.always and not parts.recurrent:
        return _SplitScan(emitter, loop, parts).run(arrays)
    current = emitter_of(emitter)

    def run(*arrays: Any) -> Arrays:
        if parts.always:
            return _SplitScan(current(), loop, parts).run(arrays)
        return loop.run(current(), plan, arrays)

    def derivative(arrays: Arrays, tangents: Mapping[int, Any]) -> tuple[Any, Any]:
        return _SplitScan(current(), loop, parts).derivative(arrays, tangents)

    # Its id is taken as long as JAX keeps what the scan stands in.
    program = id(action.eqn.params["jaxpr"])
    operands = tuple([(v.aval, v.dtype, v.traits) for v in action.operands])
    made_of = program, loop, action.context, operands
    return list(differentiated_as(run, derivative, made_of)(*arrays))


def _run_back(
    emitter: Emitter, loop: _Loop, plan: Plan, arrays: Arrays, back: LoopBack | None
) -> Arrays:
    """A loop, which may be a loop back some products of which are made behind it."""
    if back is None:
        return loop.run(emitter, plan, arrays)
    dtypes = tuple([loop.result_dtypes[place] for place in back.kept])
    within = loop._replace(result_dtypes=dtypes)
    given = within.run(emitter, back.within, arrays)
    return back.behind(emitter.run, given, *loop.parts(arrays))


class _Loop(NamedTuple):
    """What of a scan's equation its emission needs.

    JAX keeps rules for derivatives, which may not keep the equation: the program that
    is kept by what the equation holds would keep that alive.
    """

    consts: int
    carried: int
    slices: int
    result_dtypes: tuple[Any, ...]
    slots: tuple[int, ...]  # of which constants it takes casts, after all that it takes
    shared: tuple[int, ...]  # of which operands it takes casts that share a gradient
    length: Any
    reverse: bool
    unroll: Any
    transposable: bool
    in_float32: bool  # whether its stacks are

    @classmethod
    def of(cls, action: Structural) -> _Loop:
        params = action.eqn.params
        consts, carried = scan_counts(params)
        return cls(
            consts,
            carried,
            len(action.eqn.invars) - consts - carried,
            tuple(action.result_dtypes),
            tuple(action.slots),
            tuple(action.shared),
            params["length"],
            params["reverse"],
            params["unroll"],
            action.context.transposable,
            stacks_in_float32(action),
        )

    @property
    def first_slice(self) -> int:
        return self.consts + self.carried

    @property
    def first_cast(self) -> int:
        return self.first_slice + self.slices

    def parts(self, arrays: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Its constants, its stacks of slices, and casts of constants."""
        casts = arrays[self.first_cast :][: len(self.slots)]
        stacks = arrays[self.first_slice : self.first_cast]
        return arrays[: self.consts], stacks, casts

    def run(
        self,
        emitter: Emitter,
        plan: Plan,
        arrays: Arrays,
        made: Sequence[Any] = (),
        fixed: Sequence[Any] = (),
    ) -> Arrays:
        """A scan of a plan, which may take more than the equation, and give more.

        Args:
          emitter: emits the steps.
          plan: what is to run in each step.
          arrays: what the equation takes.
          made: further stacks of slices.
          fixed: further constants.
        """
        slices = arrays[self.first_slice : self.first_cast]
        sliced = {p: a for p, a in self._casts(arrays).items() if p >= self.consts}
        made = stackable(made) if self.in_float32 else made
        step = self._step(emitter, plan, arrays, [*sliced], len(made), fixed)
        final, stacked = lax.scan(
            step,
            [*arrays[self.consts :][: self.carried]],
            (slices, made, [*sliced.values()]),
            # It may be symbolic, which only slices may have.
            length=None if slices else self.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        further = plan.results[len(self.result_dtypes) :]
        dtypes = [*self.result_dtypes, *(value.dtype for value in further)]
        return [*final, *convert_all(stacked, dtypes[self.carried :])]

    def _casts(self, arrays: Arrays) -> dict[int, Any]:
        """By the places of operands, casts that share a gradient."""
        after_all = arrays[self.first_cast + len(self.slots) :]
        return dict(zip(self.shared, after_all, strict=True))

    def _step(
        self,
        emitter: Emitter,
        plan: Plan,
        arrays: Arrays,
        sliced: Sequence[int],
        made: int,
        fixed: Sequence[Any],
    ) -> Callable[..., Any]:
        """A step; `sliced` are the places of stacks with a cast that is sliced too."""
        consts, _, extras = self.parts(arrays)
        casts = self._casts(arrays)
        # What is perturbed of arrays in 16 bits is wide, for their gradients to add up.
        wide = [
            array
            if self.transposable or not _dtypes.below_float32(_dtype_of(array))
            else convert(casts.get(place, array), _dtypes.FLOAT32)
            for place, array in enumerate(consts)
        ]
        narrow = [
            array if _dtype_of(array) is None else lax.stop_gradient(array)
            for array in (*consts, *extras)
        ]
        end, count = self.first_cast + made, self.consts
        dtypes = [value.dtype for value in plan.inputs[self.first_cast : end]]
        sliced_or_carried = range(count, end) if self.in_float32 else ()

        def step(carried: Sequence[Any], given: tuple[Any, ...]) -> tuple[Any, Any]:
            slices, made, wides = given
            made = convert_all(made, dtypes)
            sources = [*wide, *(wide[slot] for slot in self.slots)]
            shared = [
                array if _dtype_of(array) == _dtype_of(own) else narrowed(array, own)
                for array, own in zip(sources, narrow, strict=True)
            ]
            taken = [*shared[:count], *carried, *slices, *made, *fixed, *shared[count:]]
            pairs = enumerate(zip(taken[:count], wide, strict=True))
            others = {p: w for p, (own, w) in pairs if _dtype_of(own) != _dtype_of(w)}
            others.update(zip(sliced, wides, strict=True))
            results = emitter.run(plan, taken, sliced_or_carried, others)
            kept = self.result_dtypes[: self.carried]
            carried = convert_all(results[: self.carried], kept)
            left = results[self.carried :]
            return carried, stackable(left) if self.in_float32 else left

        return step


class _SplitScan(NamedTuple):
    """A scan some products of which are made before it, or changed from outside."""

    emitter: Emitter
    loop: _Loop
    parts: Split

    def run(self, arrays: Arrays) -> Arrays:
        made = self._made(arrays)
        return self.loop.run(self.emitter, self.parts.within, arrays, made)

    def derivative(
        self, arrays: Arrays, tangents: Mapping[int, Any]
    ) -> tuple[Arrays, Any]:
        """The results and their tangents, from those of arrays by their places."""
        first, end = self.loop.first_slice, self.loop.first_cast
        behind = self.parts.behind([p - first for p in tangents if first <= p < end])
        if behind is not None and not _is_spread(behind):
            # Of constants, and of their casts.
            places = [*range(self.loop.consts), *range(end, len(arrays))]
            changing = [
                product
                for product in behind.products
                if not tangents.keys().isdisjoint(places[p] for p in product.read)
            ]
            if changing:
                return self._changed(behind, changing, arrays, tangents)

        def run(*given: Any) -> Arrays:
            return self.run(_with(arrays, tangents, given))

        perturbed = [arrays[place] for place in tangents]
        return jax.jvp(run, perturbed, [*tangents.values()])

    def _changed(
        self,
        behind: Behind,
        changing: Sequence[Moved],
        arrays: Arrays,
        tangents: Mapping[int, Any],
    ) -> tuple[Arrays, Any]:
        """The same where weights change that multiply what is carried.

        What this changes of a product is made for all steps together, and enters the
        loop with a slice. It is made of what the weights multiply, so that the loop
        runs first, and then what is linear of it.
        """
        first, slices = self.loop.first_slice, self.loop.slices
        places, changes = [*tangents], [*tangents.values()]
        perturbed = [arrays[place] for place in places]

        def prepared(*given: Any) -> tuple[Any, Any]:
            found = _with(arrays, places, given)
            consts, _, casts = self.loop.parts(found)
            weights = self.emitter.run(behind.weights, [*consts, *casts])
            return self._made(found), weights

        (made, weights), (of_made, of_weights) = jax.jvp(prepared, perturbed, changes)
        made += self._added(behind, arrays)

        def loop(given: Arrays, made: Arrays) -> tuple[Arrays, Arrays]:
            found, count = _with(arrays, places, given), len(self.loop.result_dtypes)
            plan = behind.within
            results = self.loop.run(self.emitter, plan, found, made, weights)
            return results[:count], results[count:]

        results, linear, stacks = jax.linearize(loop, perturbed, made, has_aux=True)
        of_made += [jnp.zeros_like(array) for array in made[len(of_made) :]]
        for product in changing:
            stack, of_weight = stacks[product.multiplied], of_weights[product.weight]
            change = self._change(product, stack, of_weight)
            entering, place = of_made, product.carrier - slices
            if place < 0:
                entering, place = changes, places.index(first + product.carrier)
            entering[place] += convert(change, entering[place].dtype)
        return results, linear(changes, of_made)

    def _change(self, product: Moved, stack: Any, of_weight: Any) -> Any:
        """How a product changes with its weight, in all steps."""

        def of_one(array: Any) -> Any:
            return self.emitter.run(product.of_change, [array, of_weight])[0]

        return jax.vmap(of_one)(stack)

    def _made(self, arrays: Arrays) -> list[Any]:
        return self.parts.stacked(self.emitter.run, *self.loop.parts(arrays))

    def _added(self, behind: Behind, arrays: Arrays) -> list[Any]:
        """Slices that are there to be perturbed."""
        _, slices, _ = self.loop.parts(arrays)
        # It may be symbolic, which only slices may have.
        length = slices[0].shape[0] if slices else self.loop.length
        return [jnp.zeros((length, *v.aval.shape), v.dtype) for v in behind.added]


def _is_spread(behind: Behind) -> bool:
    """Whether types say over which devices arrays are spread, as zeros are not.

    Where that is explicit, a product may be spread as what it is added to is not.
    """
    mesh = get_abstract_mesh()
    return bool(mesh.explicit_axes or (behind.added and mesh.manual_axes))


def _with(arrays: Arrays, places: Iterable[int], given: Sequence[Any]) -> list[Any]:
    """Arrays with others at some places."""
    found = dict(enumerate(arrays)) | dict(zip(places, given, strict=True))
    return [*found.values()]


def _dtype_of(array: Any) -> Any:
    """Its dtype; None of a reference, and of what else is no array."""
    aval = jax.typeof(array)
    return aval.dtype if is_plain_array(aval) else None

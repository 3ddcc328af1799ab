"""Gradients of what is widened: where they are added up before they are rounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from jamp import _primitives
from jamp._dtypes import FLOAT32
from jamp._equations.walks import holds_any
from jamp._plan.biases import moved_wide, moves
from jamp._plan.plan import Action, Bind, Cast, Float32Call, Structural, shared_by
from jamp._plan.values import Value


def with_float32_gradients(
    actions: Sequence[Action], products: Collection[int]
) -> list[Action]:
    """Actions, with float32 for gradients that are added up.

    Args:
      actions: the actions.
      products: the numbers of products in float32, to which their biases are added.
    """
    if products:
        actions = [*_with_gradients_of_biases(actions, products)]
    return [*_with_shared_casts(actions)]


def _with_gradients_of_biases(
    actions: Sequence[Action], products: Container[int]
) -> Iterator[Action]:
    """Actions, where a bias gets float32 from what reduces its layer's results.

    A bias adds up the gradients of all rows. Those of a loss may be alike, as where the
    layer begins with zeros: then they are rounded alike, and nothing averages out. The
    gradients of what is elementwise are as large as the layer, and written in 16 bits.
    """
    # Sums with biases by their own numbers, and by those of their 16 bits.
    layers: dict[int, Value] = {}
    moving: dict[int, Bind] = {}  # what moves these 16 bits, by that of its result
    # What moves the float32 likewise, behind what moves the 16 bits: the first reader
    # may come to stand there, too.
    moved: dict[Action, Bind] = {}
    written = []

    def is_known(value: Value) -> bool:
        return value.number in layers or value.number in moving

    for action in actions:
        taken = action.operands
        places = [place for place in action.widens if is_known(taken[place])]
        if places and _adds_up(action):
            wides = [_moved(taken[p].number, layers, moving, moved) for p in places]
            action = replace(action, operands=[*taken, *wides], shared=places)
        elif moves(action) and is_known(taken[0]):
            moving.update((value.number, action) for value in action.results)
        elif isinstance(action, Bind) and action.name == "add":
            if any(value.number in products for value in action.operands):
                layers[action.results[0].number] = action.results[0]
        elif isinstance(action, Cast) and action.operands[0].number in layers:
            layers[action.results[0].number] = action.operands[0]
        written.append(action)
    for action in written:
        yield action
        if action in moved:
            yield moved[action]


def _moved(
    number: int,
    layers: dict[int, Value],
    moving: Mapping[int, Bind],
    moved: dict[Action, Bind],
) -> Value:
    """The float32 of a layer, moved as its 16 bits were."""
    source, moves_to_it = number, []
    while source not in layers:
        moves_to_it.append(moving[source])
        (value,) = moving[source].operands
        source = value.number
    for action in reversed(moves_to_it):
        (value,) = action.operands
        wide = moved[action] = moved_wide(action, layers[value.number])
        pairs = zip(action.results, wide.results, strict=True)
        layers.update((result.number, made) for result, made in pairs)
    return layers[number]


def _adds_up(action: Action) -> TypeGuard[Cast | Float32Call]:
    """Whether what widens a layer reduces it, or may be read by what does."""
    if isinstance(action, Float32Call):
        return holds_any(action.eqns, _primitives.REDUCTIONS)
    return isinstance(action, Cast)


def _with_shared_casts(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions, where those that widen the same 16 bits share the gradient of one cast.

    Their gradients are then added up in float32, and rounded once.
    """
    counts: Counter[int] = Counter()
    casts: dict[int, Cast] = {}
    widened = [
        [place for place in action.widens if place not in shared_by(action)]
        for action in actions
    ]
    for action, places in zip(actions, widened, strict=True):
        if isinstance(action, Cast) and action.dtype == FLOAT32:
            casts[action.operands[0].number] = action
            counts[action.operands[0].number] += 1
        else:
            counts.update({action.operands[place].number for place in places})
    made: set[int] = set()
    for action, places in zip(actions, widened, strict=True):
        taken = action.operands
        shared = [place for place in places if counts[taken[place].number] > 1]
        if shared and isinstance(action, Float32Call | Structural):
            for value in (taken[place] for place in shared):
                if value.number not in casts:
                    wide = Value.of(value.aval, FLOAT32)
                    casts[value.number] = Cast((value,), (wide,), action.caster)
                if value.number not in made:
                    made.add(value.number)
                    yield casts[value.number]
            wides = [casts[taken[place].number].results[0] for place in shared]
            shared = [*action.shared, *shared]
            action = replace(action, operands=[*taken, *wides], shared=shared)
        elif isinstance(action, Cast):
            number = action.operands[0].number
            if casts.get(number) is action:
                if number in made:
                    continue
                made.add(number)
        yield action

"""Products of a few rows with a matrix, which a loop makes at each of its steps."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, TypeGuard

from jamp._dtypes import known_size, shape_of
from jamp._equations.walks import contracted
from jamp._lowerings.hook import has_own_product
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32
from jamp._plan.plan import Action, Bind, Plan
from jamp._plan.values import Value, Values

# One product for all steps takes less time than one of few rows for each, if a number
# is the sum of at least so many for each row, and its weights' gradient is made behind
# the loop, too. Where stacks are float32 it gains less.
MOST_ROWS = 64
ADDED = 8 if MOVES_BFLOAT16_AS_FLOAT32 else 4
# The most numbers that are made before a loop, or stacked to be multiplied behind it,
# for each number of its slices; and that it takes to be perturbed alone, for each of
# these and of what it carries.
MOST_PER_NUMBER = 4


class ByMatrix(NamedTuple):
    """A product of what moves from step to step of a loop and of a matrix."""

    action: Bind
    place: int  # of the matrix, among the factors

    @property
    def multiplied(self) -> Value:
        """What the matrix is multiplied with."""
        return self.action.operands[1 - self.place]

    @property
    def matrices(self) -> Values:
        """The matrix, and the weight that it is a cast of, if it is one."""
        factors, weights = self.action.operands[:2], self.action.operands[2:]
        wide = dict(zip(self.action.weights, weights, strict=True))
        found = factors[self.place], wide.get(self.place)
        return [value for value in found if value is not None]

    def with_matrices(self, matrices: Values) -> Bind:
        """The product with other matrices."""
        known = {v.number: own for v, own in zip(self.matrices, matrices, strict=True)}
        operands = [known.get(v.number, v) for v in self.action.operands]
        return replace(self.action, operands=operands)

    def of_change(self, plan: Plan) -> Plan:
        """A plan, like another, of how the product changes with the weight."""
        change = self.matrices[-1]
        factors = [self.multiplied, self.multiplied]
        factors[self.place] = change
        return replace(
            plan,
            inputs=[self.multiplied, change],
            extras={},
            actions=[replace(self.action, operands=factors, weights=())],
            results=self.action.results,
        )


def multiplying(step: Action, moving: Collection[int]) -> ByMatrix | None:
    """A product of something that moves and of a matrix."""
    if not is_own_matmul(step):
        return None
    factors = step.operands[:2]
    places = [at for at, value in enumerate(factors) if value.number not in moving]
    if len(places) != 1:
        return None
    return ByMatrix(step, places[0])


def is_own_matmul(step: Action) -> TypeGuard[Bind]:
    """Whether a step is a matrix product of jamp's own, with all sizes known."""
    if not isinstance(step, Bind) or step.name != "dot_general":
        return False
    if not step.operand_dtypes or not has_own_product(step.name, step.operand_dtypes):
        return False
    shapes = [value.aval.shape for value in (*step.operands[:2], *step.results)]
    return all(isinstance(size, int) for shape in shapes for size in shape)


def is_worth_all_steps(product: ByMatrix, least: int) -> bool:
    """Whether a product of few rows takes less time with those of all steps."""
    added: int = math.prod(contracted(product.action.eqn))
    rows: int = math.prod(product.multiplied.aval.shape) // max(added, 1)
    return rows <= MOST_ROWS and added >= least * rows


def size_of_value(value: Value) -> int:
    return known_size(shape_of(value))

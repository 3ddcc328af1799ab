"""The rules for equations that hold programs, by primitive."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jamp._plan.equation import Equation
from jamp._plan.values import Value

StructuralRule = Callable[[Equation], list[Value]]

_rules: dict[str, StructuralRule] = {}

STRUCTURAL: Mapping[str, StructuralRule] = MappingProxyType(_rules)


def structural(*primitives: str) -> Callable[[StructuralRule], StructuralRule]:
    """Registers what plans the equations of some primitives.

    Raises:
      ValueError: one of them has a rule already.
    """

    def register(rule: StructuralRule) -> StructuralRule:
        for name in primitives:
            if name in _rules:
                raise ValueError(
                    f"{name} has a rule already: {_rules[name].__qualname__}"
                )
            _rules[name] = rule
        return rule

    return register

"""Random programs: nested operations and forms (loops, branches, derivatives, regions).

A program is a function of `arguments()`, prints as text that shows what it does, and
bounds its own error under autocast before it runs.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from random_operations import (
    BY_KIND,
    EXTRAS,
    KINK,
    LEAVES,
    OPERATIONS,
    SHAPES,
    UNIT,
)

import jamp


def custom_vjp(body, c, env):
    """With the derivative that the body has, taken by the function's own rules."""
    function = jax.custom_vjp(body)
    function.defvjp(
        lambda c, env: (body(c, env), (c, env)),
        lambda saved, cotangent: jax.vjp(body, *saved)[1](cotangent),
    )
    return function(c, env)


def custom_jvp(body, c, env):
    function = jax.custom_jvp(body)
    function.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return function(c, env)


def scan(f, c, **options):
    last, seen = lax.scan(lambda c, _: (f(c), c), c, None, length=STEPS, **options)
    return (last + seen[1]) / 2


def repeated(f, c):
    step = lambda state: (state[0] + 1, f(state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < STEPS, step, (0, c))[1]


def scoped(f, c):
    with jax.named_scope("inner"):
        return f(c)


def layer(f, c):
    """Listed among those that take 16 bits."""
    return f(c)


def as_written(f, c):
    with jamp.autocast(enabled=False):
        return f(c)


def in_bfloat16(f, c):
    with jamp.autocast(dtype=jnp.bfloat16):
        return f(c)


STEPS = 3
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

# Each takes a function of a value, which returns one of the same kind, and a value.
LOOPS = {
    "scan": scan,
    "scan_reversed": lambda f, c: scan(f, c, reverse=True, unroll=2),
    "fori_loop": lambda f, c: lax.fori_loop(0, STEPS, lambda _, c: f(c), c),
    "while_loop": repeated,
}
CALLS = {
    "jit": lambda f, c: jax.jit(f)(c),
    "jit_of_two": lambda f, c: jax.jit(lambda c, _: f(c))(c, c),
    "checkpoint": lambda f, c: jax.checkpoint(f)(c),
    "checkpoint_dots": lambda f, c: jax.checkpoint(f, policy=DOTS)(c),
    "named_scope": scoped,
    "layer": layer,
    "grad": lambda f, c: jnp.tanh(jax.grad(lambda c: jnp.sum(f(c)))(c)),
}
# Over the rows of a matrix.
MAPS = {
    "map": lambda f, c: lax.map(f, c),
    "vmap": lambda f, c: jax.vmap(f)(c),
}
# These take two functions, and `n`.
BRANCHES = {
    "cond": lambda f, g, c, n: lax.cond(n[0] > 1, f, g, c),
    "cond_of_two": lambda f, g, c, n: lax.cond(
        n[0] > 1, lambda c, _: f(c), lambda c, _: g(c), c, c
    ),
    "switch": lambda f, g, c, n: lax.switch(n[1], [f, g, lambda c: c], c),
}
# What their functions close over is passed too.
CUSTOM = {"custom_vjp": custom_vjp, "custom_jvp": custom_jvp}
# Without autocast around them these are nothing.
REGIONS = {"region": as_written, "bfloat16": in_bfloat16, "autocast": jamp.autocast}
FORMS = LOOPS | CALLS | MAPS | BRANCHES | CUSTOM | REGIONS


@functools.cache
def policy(device):
    return jamp.Policy.load(device).with_rules(lower=[layer])


def autocast(fn, device):
    return jamp.autocast(fn, device_type=device, policy=policy(device))


class Bound(NamedTuple):
    """What is known of a value under autocast, to first order.

    Attributes:
      error: how far an element may be from that of float32.
      slope: the largest row sum of the absolute Jacobian by all arguments.
      turn: the same for the Jacobian's difference from that of float32.
    """

    error: float = 0
    slope: float = 1
    turn: float = 0


@dataclass(frozen=True)
class Leaf:
    """An argument, or what a form binds in its bodies."""

    name: str

    def __repr__(self):
        return self.name

    def run(self, env, device):
        return env[self.name]

    def bound(self, env, unit):
        return env[self.name]


@dataclass(frozen=True)
class Call:
    """An operation and its operands."""

    name: str
    operands: tuple[Any, ...]

    def __repr__(self):
        return f"{self.name}({', '.join(map(repr, self.operands))})"

    def run(self, env, device):
        fn = OPERATIONS[self.name].fn
        extra = {name: env[name] for name in EXTRAS[self.name]}
        return fn(*(operand.run(env, device) for operand in self.operands), **extra)

    def bound(self, env, unit):
        """By the chain rule; cotangents are rounded on their way back, too."""
        op = OPERATIONS[self.name]
        known = [operand.bound(env, unit) for operand in self.operands]
        own = op.roundings * max(unit, op.unit)
        pairs = list(zip(op.gains, known, strict=True))
        slopes = sum(b.slope for b in known)
        bend = 0.0
        if op.curve and slopes:
            bend = op.curve * (max(b.error for b in known) + own) * slopes
        return Bound(
            sum(gain * b.error for gain, b in pairs) + own,
            sum(gain * b.slope for gain, b in pairs),
            sum(gain * (b.turn + 2 * own * b.slope) for gain, b in pairs) + bend,
        )


@dataclass(frozen=True)
class Form:
    """A form, its bodies as functions of `variable`, and its operand."""

    name: str
    kind: str
    variable: str
    bodies: tuple[Any, ...]
    operand: Any

    def __repr__(self):
        bodies = ", ".join(f"lambda {self.variable}: {body}" for body in self.bodies)
        return f"{self.name}({bodies}, {self.operand})"

    def run(self, env, device):
        c = self.operand.run(env, device)
        bodies = [self._function(body, device) for body in self.bodies]
        functions = [functools.partial(body, env=env) for body in bodies]
        if self.name in REGIONS and device is None:
            return functions[0](c)
        if self.name == "autocast":
            return autocast(functions[0], device)(c)
        form = FORMS[self.name]
        if self.name in CUSTOM:
            return form(bodies[0], c, env)
        if self.name in BRANCHES:
            return form(*functions, c, env["n"])
        return form(functions[0], c)

    def bound(self, env, unit):
        if self.name == "bfloat16":
            unit = UNIT[jnp.bfloat16]
        entering = self.operand.bound(env, unit)
        if self.name == "grad":
            # The sum over a column of the Jacobian has as many terms as the result.
            still = {
                name: known._replace(slope=0, turn=0) for name, known in env.items()
            }
            c = Bound(entering.error)
            (inner,) = self._bodies(still, c, unit)
            size = math.prod(SHAPES[self.kind])
            return Bound(size * inner.turn + 2 * unit, math.inf, math.inf)
        result = entering
        for _ in range(STEPS if self.name in LOOPS else 1):
            # The maximum of the branches, and a cast where they or iterations meet.
            branches = self._bodies(env, result, unit)
            result = Bound(*map(max, zip(*branches, strict=True)))
            result = result._replace(error=result.error + 2 * unit)
        if self.name == "layer":
            # Its operand is rounded, and so are the gradients that it adds up of it.
            return result._replace(turn=result.turn + 4 * unit * result.slope)
        return result

    def _function(self, body, device):
        return lambda c, env: body.run({**env, self.variable: c}, device)

    def _bodies(self, env, c, unit):
        return [body.bound({**env, self.variable: c}, unit) for body in self.bodies]


@dataclass(frozen=True)
class Program:
    """A function of `arguments()`: values, of the kinds told, and two integers."""

    kinds: tuple[str, ...]
    results: tuple[Any, ...]

    def __repr__(self):
        return f"[{', '.join(map(repr, self.results))}]"

    def __call__(self, env, device=None):
        values = [result.run(env, device) for result in self.results]
        return {
            "values": values,
            "place": jnp.argmax(values[0]),
            "count": env["mask"].sum() + env["n"],
        }

    def bounds(self, unit):
        """The bound of each result."""
        return [r.bound(dict.fromkeys(LEAVES, Bound()), unit) for r in self.results]


class Scope(NamedTuple):
    """What an expression may be made of.

    Attributes:
      names: its variables, and their kinds.
      forms: the forms that it may use.
      smooth: whether its derivatives must be continuous.
    """

    names: tuple[tuple[str, str], ...]
    forms: tuple[str, ...]
    smooth: bool

    def without(self, *forms):
        return self._replace(forms=tuple(f for f in self.forms if f not in forms))

    def inside(self, form):
        """The scope of a form's bodies."""
        if form == "grad":
            # A derivative of a derivative has no bound here, nor has a loop's, in JAX.
            return self.without("grad", "while_loop")._replace(smooth=True)
        if form == "custom_jvp":
            return self.without("custom_vjp")
        if form == "region":
            return self.without("autocast", "bfloat16")
        return self


PRODUCTS = {
    "m": ("matmul", "linear", "convolution", "product", "scores", "three"),
    "v": ("dense", "applied"),
    "s": ("vdot",),
}


def operations(kind, smooth):
    """Names of operations; each second one drawn is a product."""
    found = BY_KIND[kind].items()
    every = [name for name, op in found if op.curve < KINK or not smooth]
    return st.sampled_from(PRODUCTS[kind]) | st.sampled_from(every)


@st.composite
def expressions(draw, kind, scope, depth):
    """Expressions of a kind, in which up to `depth` operations and forms are nested."""
    forms = [form for form in scope.forms if kind == "m" or form not in MAPS]
    if depth == 0 or kind in "wk":
        return Leaf(draw(st.sampled_from([n for n, k in scope.names if k == kind])))
    if forms and draw(st.booleans()):
        return draw(_forms(kind, scope, depth, draw(st.sampled_from(forms))))
    name = draw(operations(kind, scope.smooth))
    takes = OPERATIONS[name].takes.replace("*", kind)
    # One operand is as deep as it may be, so that programs stay small.
    depths = [depth - 1, *(min(depth - 1, 1) for _ in takes[1:])]
    return Call(
        name,
        tuple(
            draw(expressions(taken, scope, limit))
            for taken, limit in zip(takes, depths, strict=True)
        ),
    )


@st.composite
def _forms(draw, kind, scope, depth, name):
    inner = scope.inside(name)
    variable = f"c{sum(k.startswith('c') for k, _ in scope.names) + 1}"
    body_kind = "v" if name in MAPS else kind
    inner = inner._replace(names=((variable, body_kind), *inner.names))
    bodies = tuple(
        draw(expressions(body_kind, inner, depth - 1))
        for _ in range(2 if name in BRANCHES else 1)
    )
    operand = draw(expressions(kind, scope, min(depth - 1, 1)))
    return Form(name, kind, variable, bodies, operand)


@st.composite
def programs(draw, without=(), smooth=False, kinds="mvs", depth=5):
    """Programs of one result or two, of at most a depth, without some forms."""
    forms = tuple(form for form in FORMS if form not in without)
    scope = Scope(tuple(LEAVES.items()), forms, smooth)
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2))
    results = [
        draw(expressions(kind, scope, draw(st.integers(1, depth)))) for kind in drawn
    ]
    return Program(tuple(drawn), tuple(results))

"""What tests read in a jaxpr: its equations, their dtypes, its text."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jamp._equations import walks
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

# Those of a function at each of its calls.
equations = functools.partial(walks.equations, once=False)

LOW = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def traced(fn, *args, **kwargs):
    """The closed jaxpr of a function."""
    return jax.make_jaxpr(fn)(*args, **kwargs)


def text(fn, *args):
    """The jaxpr of a function as text, without memory addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(traced(fn, *args)))


def primitives(jaxpr):
    """How often each primitive occurs."""
    return Counter(eqn.primitive.name for eqn in equations(jaxpr))


def operand_dtypes(jaxpr, *names):
    """Operand dtypes of each equation of the named primitives."""
    return [
        tuple(var.aval.dtype.name for var in factors(eqn))
        for eqn in equations(jaxpr)
        if eqn.primitive.name in names
    ]


def factors(eqn):
    """The operands of an equation, without those that others are casts of."""
    return eqn.invars[:2] if "weights" in eqn.params else eqn.invars


def matmul_dtypes(jaxpr):
    """Dtypes of the two operands of each matmul and convolution, as it multiplies them.

    Some take what was widened from the dtype that they multiply in, and cast it
    themselves: the cotangent of a layer on CPUs, and where stacks of loops are float32.
    On the way back a cotangent that functions in float32 gave may come in float32.
    """
    widened = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "convert_element_type":
            widened[eqn.outvars[0]] = eqn.invars[0].aval.dtype
        elif eqn.primitive.name in ("reshape", "squeeze", "transpose"):
            widened[eqn.outvars[0]] = widened.get(eqn.invars[0])

    def multiplied(eqn):
        own = eqn.params.get("dtype")
        pair = [var.aval.dtype for var in eqn.invars[:2]]
        if own is None:
            return pair
        known = [None if isinstance(v, Literal) else widened.get(v) for v in eqn.invars]
        same = [own in found for found in zip(pair, known, strict=False)]
        back = "transpose" in str(eqn.source_info.name_stack)
        enough = any(same) if back else all(same)
        return [own, own] if MOVES_BFLOAT16_AS_FLOAT32 or enough else pair

    return [
        tuple(dtype.name for dtype in multiplied(eqn))
        for eqn in equations(jaxpr)
        if "dot_general" in eqn.primitive.name or "conv_general" in eqn.primitive.name
    ]


def casts(jaxpr, source=None, target=None):
    """Casts between floating dtypes, as (from, to, shape)."""
    found = [
        (eqn.invars[0].aval.dtype, eqn.params["new_dtype"], eqn.invars[0].aval.shape)
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "convert_element_type"
    ]
    return [
        (old.name, np.dtype(new).name, shape)
        for old, new, shape in found
        if jnp.issubdtype(old, jnp.floating)
        and jnp.issubdtype(new, jnp.floating)
        and (source is None or old == source)
        and (target is None or new == target)
    ]


def dtypes(tree):
    """The dtype names of a tree's leaves."""
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


def is_float(leaf):
    """Whether a leaf has a floating dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))

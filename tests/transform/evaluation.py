"""Runs a jaxpr equation by equation.

Compiling a random program takes a second, while all the single equations of such
programs are compiled before long. Loops and branches run as those of Python.
"""

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jamp._compat import scan_counts


def evaluate(program, operands):
    """The results of a jaxpr, closed or without constants."""
    jaxpr = getattr(program, "jaxpr", program)
    env = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env |= zip(jaxpr.invars, operands, strict=True)

    def read(var):
        if isinstance(var, Literal):
            return np.asarray(var.val, var.aval.dtype)
        return env[var]

    for eqn in jaxpr.eqns:
        run = _HELD.get(eqn.primitive.name, _bind)
        results = run(eqn, [read(var) for var in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
    return [read(var) for var in jaxpr.outvars]


def evaluated(fn, *arguments):
    """The results of a function, traced as a whole and run by equations."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    results = evaluate(program, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _bind(eqn, operands):
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*operands, **params)
    return results if eqn.primitive.multiple_results else [results]


def _call(eqn, operands):
    (program,) = jaxprs_in_params(eqn.params)
    return evaluate(program, operands)


def _cond(eqn, operands):
    index, *rest = operands
    branches = eqn.params["branches"]
    return evaluate(branches[np.clip(index, 0, len(branches) - 1)], rest)


def _while(eqn, operands):
    params = eqn.params
    split = params["cond_nconsts"]
    body = split + params["body_nconsts"]
    test_consts, body_consts = operands[:split], operands[split:body]
    carry = operands[body:]
    while evaluate(params["cond_jaxpr"], [*test_consts, *carry])[0]:
        carry = evaluate(params["body_jaxpr"], [*body_consts, *carry])
    return carry


def _scan(eqn, operands):
    params = eqn.params
    consts, carried = scan_counts(params)
    carry = operands[consts:][:carried]
    slices = [np.asarray(xs) for xs in operands[consts + carried :]]
    order = range(params["length"])
    rows = {}
    for i in reversed(order) if params["reverse"] else order:
        inputs = [*operands[:consts], *carry, *(xs[i] for xs in slices)]
        results = evaluate(params["jaxpr"], inputs)
        carry, rows[i] = results[:carried], results[carried:]
    stacked = zip(*(rows[i] for i in order), strict=True)
    return [*carry, *(np.stack([np.asarray(x) for x in xs]) for xs in stacked)]


_HELD = {
    "checkpoint": _call,
    "closed_call": _call,
    "cond": _cond,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "jit": _call,
    "remat2": _call,
    "scan": _scan,
    "while": _while,
}

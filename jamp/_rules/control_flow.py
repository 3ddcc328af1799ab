"""Loops and branches: bodies are rewritten, carries settle, branches meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jamp import _dtypes
from jamp._compat import scan_counts
from jamp._rules.programs import Rewritten, cast_to, note, rewrite
from jamp._rules.site import Site
from jamp._values import Traits, Value


@jax.custom_jvp
def _narrowed(wide: Any, narrow: Any) -> Any:
    """A cast made elsewhere, of which every use has a gradient of its own in float32.

    Outside a loop a cast is one value, and JAX would sum its gradients over all
    iterations in its own dtype. Seen from here each use is a cast of `wide`.
    """
    del wide
    return narrow


@_narrowed.defjvp
def _narrowed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    wide, narrow = primals
    # Through itself again, so that it has second derivatives.
    primal = _narrowed(wide, narrow)
    return primal, lax.convert_element_type(tangents[0], narrow.dtype)


def run_scan(site: Site) -> list[Value]:
    """Runs a scan; casts of what its iterations share stand outside it."""
    params, operands, emitter = site.eqn.params, site.operands, site.emitter
    num_consts, num_carry = scan_counts(params)
    consts, carry = operands[:num_consts], operands[num_consts:][:num_carry]
    slices = operands[num_consts + num_carry :]
    avals = params["jaxpr"].in_avals[num_consts + num_carry :]
    sliced = [
        _stand_in(aval, value.dtype) for aval, value in zip(avals, slices, strict=True)
    ]

    # `_narrowed` has no transpose.
    hoisted = range(0 if site.context.linear else num_consts)

    def body(carried: Sequence[Value]) -> Rewritten:
        inputs = [*consts, *carried, *sliced]
        return rewrite(site, params["jaxpr"], inputs, hoisted=hoisted)

    inner, settled = _settle(carry, body)
    note(site, inner)
    arrays = site.arrays
    if not inner.changed and _unchanged(carry, settled):
        return [Value.of(array) for array in site.bind(arrays)]
    inner.note_casts(settled, emitter.record)
    shared = arrays[:num_consts]
    extras = [
        lax.stop_gradient(emitter.cast(consts[slot], dtype))
        for slot, dtype in inner.extras
    ]
    slots = [slot for slot, _ in inner.extras]

    def step(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        casts = [
            _narrowed(shared[slot], extra)
            for slot, extra in zip(slots, extras, strict=True)
        ]
        results = inner(*shared, *carried, *slices, *casts)
        carried = cast_to(results[:num_carry], settled)
        return carried, results[num_carry:]

    final, stacked = lax.scan(
        step,
        [emitter.cast(v, d) for v, d in zip(carry, settled, strict=True)],
        arrays[num_consts + num_carry :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [Value.of(array) for array in (*final, *stacked)]


def run_while(site: Site) -> list[Value]:
    """Runs a while loop."""
    params, operands, emitter = site.eqn.params, site.operands, site.emitter
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = operands[:num_cond], operands[num_cond:]
    body_consts, carry = rest[:num_body], rest[num_body:]

    def body(carried: Sequence[Value]) -> Rewritten:
        inputs = [*body_consts, *carried]
        return rewrite(site, params["body_jaxpr"], inputs, hoisted=range(num_body))

    inner, settled = _settle(carry, body)
    inputs = [*cond_consts, *_carried(carry, settled)]
    test = rewrite(site, params["cond_jaxpr"], inputs)
    note(site, test, inner)
    if not (inner.changed or test.changed) and _unchanged(carry, settled):
        return [Value.of(array) for array in site.bind(site.arrays)]
    cond_arrays = [value.array for value in cond_consts]
    body_arrays = [value.array for value in body_consts]
    extras = [emitter.cast(body_consts[slot], dtype) for slot, dtype in inner.extras]
    inner.note_casts(settled, emitter.record)
    final = lax.while_loop(
        lambda carried: test(*cond_arrays, *carried)[0],
        lambda carried: cast_to(inner(*body_arrays, *carried, *extras), settled),
        [emitter.cast(v, d) for v, d in zip(carry, settled, strict=True)],
    )
    return [Value.of(array) for array in final]


def run_cond(site: Site) -> list[Value]:
    """Runs a conditional or switch; its branches meet at the widest dtypes."""
    inputs = site.operands[1:]
    branches = [rewrite(site, branch, inputs) for branch in site.eqn.params["branches"]]
    note(site, *branches)
    programs = site.eqn.params["branches"]
    if any(branch.changed for branch in branches):
        dtypes = [
            _meet(options)
            for options in zip(*(branch.dtypes for branch in branches), strict=True)
        ]
        programs = tuple(
            branch.giving(dtypes, site.emitter.record) for branch in branches
        )
    results = site.bind(site.arrays, branches=programs)
    return [Value.of(array) for array in results]


def _meet(dtypes: Sequence[Any]) -> Any:
    floats = [dtype for dtype in dtypes if dtype is not None]
    if floats and all(map(_dtypes.eligible, floats)):
        return _dtypes.widest(floats)
    return dtypes[0]


def _settle(
    carry: Sequence[Value], body: Callable[[Sequence[Value]], Rewritten]
) -> tuple[Rewritten, list[Any]]:
    """Finds the dtypes at which a loop's carry stays what it is.

    They are those that iterating one by one would come to, from the dtypes that come
    in; where it would go back and forth, the widest.
    """
    dtypes = [value.dtype for value in carry]
    seen = [dtypes]
    while True:
        inner = body(_carried(carry, dtypes))
        after = list(inner.dtypes[: len(carry)])
        if after == dtypes:
            return inner, dtypes
        if after in seen or len(seen) > len(carry) + 1:
            after = [_meet(options) for options in zip(dtypes, after, strict=True)]
            if after == dtypes:
                return inner, dtypes
        dtypes = after
        seen.append(dtypes)


def _carried(carry: Sequence[Value], dtypes: Sequence[Any]) -> list[Value]:
    """Stand-ins for a loop's carry in certain dtypes."""
    return [
        _stand_in(
            value.aval.update(weak_type=False) if value.eligible else value.aval, d
        )
        for value, d in zip(carry, dtypes, strict=True)
    ]


def _stand_in(aval: Any, dtype: Any) -> Value:
    """A value of a type in another dtype, of which nothing else is known."""
    if dtype != aval.dtype:
        aval = aval.update(dtype=dtype)
    return Value(None, aval, Traits(rank=aval.ndim))


def _unchanged(carry: Sequence[Value], dtypes: Sequence[Any]) -> bool:
    return [value.dtype for value in carry] == list(dtypes)

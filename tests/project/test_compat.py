"""What jamp takes from private JAX, where a change would raise nothing.

Each test says in its failure what jamp would do worse, and nothing else would tell.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.source_info_util import user_context

from jamp import _compat
from jamp._equations.walks import nested
from jamp._tracing.asked_dtypes import seeing_casts
from jamp._tracing.derivative_rules import rules_of
from jamp._tracing.regions import scope_names


def equations(fn, *args):
    return jax.make_jaxpr(fn)(*args).eqns


def sine(x):
    return jnp.sin(x)


def calls_sine(x):
    return sine(x) * 2


def test_frames_lead_from_the_equation_to_its_functions():
    eqn, *_ = equations(calls_sine, 1.0)
    codes, offsets = _compat.frames(eqn)
    users = [code for code in codes if code in (sine.__code__, calls_sine.__code__)]
    assert users == [sine.__code__, calls_sine.__code__], (
        "no equation would be taken for part of a listed function, such as softmax, "
        "and no message would name the user's line"
    )
    assert len(codes) == len(offsets)
    lines = [
        line
        for start, end, line in sine.__code__.co_lines()
        if start <= offsets[codes.index(sine.__code__)] < end
    ]
    assert lines == [sine.__code__.co_firstlineno + 1], (
        "messages would name the wrong line, and two calls of a listed function in one "
        "function would be taken for one"
    )


def test_a_pullback_is_told_from_a_function_of_the_users():
    _, pullback = jax.vjp(sine, 1.0)
    assert _compat.is_made_by_jax(pullback), (
        "pullbacks that a function returns would refuse 16-bit cotangents"
    )
    assert not _compat.is_made_by_jax(sine)


def test_a_program_is_told_from_what_runs_at_once():
    found = []

    def noted(x):
        found.append(_compat.becomes_a_program())
        return x

    for transform in (jax.grad, jax.vmap):
        x = 1.0 if transform is jax.grad else jnp.ones(2)
        transform(noted)(x)
        jax.jit(transform(noted))(x)
        transform(jax.jit(noted))(x)
    assert found == [False, True, True] * 2, (
        "functions of an eager gradient would be compiled in each call, or those of "
        "a jitted one traced anew"
    )


def test_a_differentiated_array_is_not_only_staged():
    found = []

    def noted(x):
        found.append(_compat.only_staged([x]))
        return x

    jax.make_jaxpr(noted)(1.0)
    jax.grad(noted)(1.0)
    assert found == [True, False], "equations of derivatives would not be shared"


def test_what_is_traced_while_an_equation_runs_can_have_frames_of_its_own():
    def has_its_own():
        def cosine(x):
            return jnp.cos(x)

        (eqn,) = equations(cosine, 1.0)
        return cosine.__code__ in _compat.frames(eqn)[0]

    (running,) = equations(sine, 1.0)
    with user_context(running.source_info.traceback):
        assert not has_its_own()
        with _compat.own_frames():
            assert has_its_own(), (
                "listed functions in rules for derivatives would not be recognised"
            )
        assert not has_its_own()


def test_frames_of_a_rule_are_followed_by_those_of_the_call():
    def fwd(x):
        return sine(x), x

    def bwd(x, g):
        return (g * jnp.cos(x),)

    def calls(x):
        return function(x)

    function = jax.custom_vjp(sine)
    function.defvjp(fwd, bwd)
    differentiated = jax.value_and_grad(jax.jit(calls))
    with _compat.around_rules(lambda: True, lambda rule: rule):
        eqns = nested(equations(differentiated, 1.0))
    found = {eqn.primitive.name: _compat.frames(eqn)[0] for eqn in eqns}
    for name, rule in {"sin": fwd, "cos": bwd}.items():
        own = [code for code in found[name] if code in (rule.__code__, calls.__code__)]
        assert own == [rule.__code__, calls.__code__], (
            "listed functions in the rules of what jax.jit holds would not be "
            "recognised, or rules would be no part of a listed function"
        )


def test_frames_inside_a_jitted_function_are_kept():
    eqn, *_ = equations(jax.jit(calls_sine), 1.0)
    (inner,) = (v for v in eqn.params.values() if hasattr(v, "eqns"))
    assert sine.__code__ in _compat.frames(inner.eqns[0])[0], (
        "listed functions inside jax.jit would not be recognised"
    )


def scoped(x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(x)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jvp, jax.grad])
def test_named_scopes_are_found_in_name_stacks(transform):
    def transformed(x):
        if transform is jax.jvp:
            return jax.jvp(scoped, (x,), (x,))
        return transform(scoped)(x)

    found = {
        scope_names(eqn.source_info.name_stack)
        for eqn in equations(transformed, jnp.ones(3) if transform is jax.vmap else 1.0)
        if eqn.primitive.name in ("sin", "cos", "mul")
    }
    assert found == {("outer", "inner")}, (
        "regions and rules for scopes would be passed over, and reports would know no "
        "modules"
    )


def beside_a_gradient(fn):
    """A function of a gradient that does not go through `fn`."""
    return lambda x: jax.grad(lambda y: fn(x) * y)(x)


@jax.custom_vjp
def straight_through(x):
    return x * 2


straight_through.defvjp(lambda x: (x * 2, None), lambda _, g: (g,))


@pytest.mark.parametrize("around", [lambda fn: fn, beside_a_gradient])
@pytest.mark.parametrize("function", [jax.nn.relu, straight_through])
def test_calls_of_a_function_have_their_derivative_rules_in_common(function, around):
    fn = around(lambda x: function(function(x)))
    with _compat.around_rules(lambda: True, lambda rule: rule):
        first, second, *_ = equations(fn, 1.0)
    assert rules_of(first) == rules_of(second) is not None, (
        "the rules of an activation would be traced anew in every layer"
    )


def test_references_are_no_plain_arrays():
    def with_reference(x):
        ref = jax.new_ref(x)
        return ref[...] + 1

    made, read, *_ = equations(with_reference, 1.0)
    assert not _compat.is_plain_array(made.outvars[0].aval), (
        "references would be cast like arrays, and what is written to them lost"
    )
    assert _compat.is_plain_array(read.outvars[0].aval), (
        "no array would be cast at all: autocast would change nothing"
    )


def test_functions_that_jax_inlines_are_known():
    message = (
        "a rule for a function that JAX inlines would be taken and never hold, instead "
        "of being refused"
    )
    assert _compat.inlined(jax.jit(sine, inline=_compat.INLINE)), message
    assert not _compat.inlined(jax.jit(sine)), "functions would be refused for nothing"
    assert not _compat.inlined(sine)


def test_what_is_inlined_leaves_no_call():
    inner = jax.jit(calls_sine, inline=_compat.INLINE)
    assert [eqn.primitive.name for eqn in equations(inner, 1.0)] == ["sin", "mul"], (
        "segments in float32 would stand in the program as calls, which XLA need not "
        "fuse and reports would count"
    )


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_settings_are_part_of_the_trace_context(setting):
    outside = _compat.trace_context()
    assert outside == _compat.trace_context()
    with setting():
        assert _compat.trace_context() != outside, (
            "an eager call would run the program that was traced under other settings"
        )


def test_transformations_are_noticed():
    assert not _compat.under_trace([jnp.ones(1)]), "eager calls would be rewritten anew"
    seen = []

    def look(x):
        seen.append((_compat.under_trace([x]), _compat.under_trace([])))
        return x

    for transform in (jax.jit, jax.vmap, jax.make_jaxpr):
        transform(look)(jnp.ones(1))
    jax.grad(look)(1.0)
    assert all(array for array, _ in seen), (
        "a program would be run, and compiled, apart from the one that is being traced"
    )
    assert seen[0][1]


def test_tracers_of_eager_transformations_stand_for_arrays():
    seen = []

    def look(x):
        seen.append(_compat.array_in(x))
        return x

    jax.vmap(jax.grad(look))(jnp.arange(2.0))
    jax.jit(look)(1.0)
    assert seen[1] is None
    assert seen[0].tolist() == [0.0, 1.0], (
        "a NaN that does no harm would raise where JAX looks for NaN"
    )


def test_what_is_only_mapped_has_no_tangents():
    seen = []

    def look(x):
        seen.append(_compat.may_have_tangents([x]))
        return x

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    mapped = jax.vmap(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec))
    mapped(jnp.ones((1, 1)))
    jax.vmap(jax.grad(look))(jnp.ones(1))
    jax.grad(lambda x: mapped(x).sum())(jnp.ones((1, 1)))
    assert seen == [False, True, True], (
        "derivative rules would ask for what an eager shard_map does not have, or not "
        "be told what is differentiated"
    )


def test_settings_of_an_equation_are_those_it_was_traced_under():
    with set_xla_metadata(kept="yes"):
        eqn, *_ = equations(sine, 1.0)
    with _compat.settings(eqn):
        again, *_ = equations(sine, 1.0)
    assert str(again.ctx) == str(eqn.ctx) != str(equations(sine, 1.0)[0].ctx), (
        "rewritten operations would lose their mesh, their host or their metadata"
    )


def test_casts_that_change_nothing_are_seen():
    seen = []

    def casts(x):
        x.astype(jnp.float32)
        jnp.asarray(x, jnp.float32)
        jnp.array(x, jnp.float32)
        jnp.float32(x)
        jnp.astype(x, jnp.float32)
        jax.lax.convert_element_type(x, jnp.float32)
        jnp.concatenate([x, x], dtype=jnp.float32)
        jnp.sum(x, dtype=jnp.float32), x.mean(dtype=jnp.float32)
        jnp.asarray(x), jnp.array(x, ndmin=1), jnp.array([x, x]), x + x
        jnp.sum(x), jnp.mean(x), jnp.concatenate([x, x])

    def see(array, filename):
        seen.append(filename)
        return array

    with seeing_casts(see):
        equations(casts, jnp.ones(3))
    assert seen.count(__file__) == 10, (
        "what a program casts to float32 would run in 16 bits, as if it said nothing"
    )

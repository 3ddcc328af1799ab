"""Primitives of jamp's own under JAX's names, with other code or other derivatives."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import ad, batching, mlir, xla

from jamp._equations.walks import replaced
from jamp._lowerings.error_checks import check_like

Operation = Callable[..., Any]
Primitives = Mapping[Primitive, Primitive]


def like(of_jax: Primitive, abstract_eval: Operation | None = None) -> Primitive:
    """A primitive with the name of one of JAX's, and its results unless told."""

    def as_known(*avals: Any, **params: Any) -> Any:
        made, _ = of_jax.abstract_eval(*avals, **params)
        return made

    primitive = Primitive(of_jax.name)
    primitive.multiple_results = of_jax.multiple_results
    primitive.def_abstract_eval(abstract_eval or as_known)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    check_like(of_jax, primitive)
    return primitive


def register(
    primitive: Primitive,
    run: Operation,
    run_on_cpu: Operation | None = None,
    run_on_one_cpu: Operation | None = None,
) -> None:
    """Registers what a primitive is, in JAX's operations.

    Args:
      primitive: the primitive.
      run: what it is.
      run_on_cpu: the same on CPUs, if it is another there.
      run_on_one_cpu: the same where arrays are not spread over several devices.
    """
    run_on_cpu = run_on_cpu or run
    several = run, run_on_cpu, run_on_one_cpu or run_on_cpu
    everywhere, on_cpu, on_one_cpu = (
        mlir.lower_fun(one, multiple_results=primitive.multiple_results)
        for one in several
    )

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        lowered = on_one_cpu if has_whole_arrays(ctx) else on_cpu
        return lowered(ctx, *operands, **params)

    mlir.register_lowering(primitive, everywhere)
    mlir.register_lowering(primitive, rule, platform="cpu")


def is_on_cpu(ctx: mlir.LoweringRuleContext) -> bool:
    return tuple(ctx.module_context.platforms) == ("cpu",)


def is_for_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def made_by(value: Any, *names: str) -> Any:
    """The operation that made a value, if it has one of some names; None otherwise."""
    if isinstance(value, ir.OpResult) and value.owner.name in names:
        return value.owner
    return None


def is_argument(value: Any) -> bool:
    """Whether a value is an argument of the whole program.

    Those of any other function or block may be a loop's.
    """
    if not isinstance(value, ir.BlockArgument):
        return False
    around = value.owner.owner
    return isinstance(around, func.FuncOp) and around.sym_name.value == "main"


def is_read(value: Any) -> bool:
    """Whether an operation that was lowered so far reads a value."""
    return next(iter(value.uses), None) is not None


def missing(eqn: JaxprEqn, present: Sequence[bool]) -> list[Any]:
    """The operands that a rule for JAX's partial evaluation asks for."""
    pairs = zip(eqn.invars, present, strict=True)
    return [v for v, there in pairs if isinstance(v, Var) and not there]


def has_whole_arrays(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether arrays are on one device, as are the parts that `shard_map` gives.

    Those with shardings in their types count as spread: JAX has to be told how what is
    made of them is.
    """
    aval: Any = ctx.avals_in[0]
    mesh = aval.sharding.mesh
    if mesh.empty:
        return is_for_one_device(ctx)
    manual: bool = mesh.are_all_axes_manual
    return manual or (is_for_one_device(ctx) and not mesh.explicit_axes)


def varying_like(array: Any, *others: Any) -> Any:
    """An array that varies over the axes of a mesh over which any of others does.

    It is another than the one given only inside of a `jax.shard_map` that checks this.
    """
    # No documented name gives these axes, but JAX's messages say how to ask for them.
    own, *of_others = (jax.typeof(value).mat.varying for value in (array, *others))
    more = sorted(frozenset().union(*of_others) - own, key=str)
    return jax.lax.pcast(array, tuple(more), to="varying") if more else array


def with_rules_of_jax(own: Primitives) -> None:
    """Gives primitives the rules of those of JAX's that they stand for.

    What these rules bind of JAX's primitives is then one of jamp's own as well.
    """
    for of_jax, primitive in own.items():
        ad.primitive_jvps[primitive] = partial(_jvp, own, of_jax)
        if of_jax in ad.primitive_transposes:
            ad.primitive_transposes[primitive] = partial(_transpose, own, of_jax)
        batching.fancy_primitive_batchers[primitive] = partial(_batch, own, of_jax)


def _jvp(
    own: Primitives, of_jax: Primitive, primals: Any, tangents: Any, /, **params: Any
) -> Any:
    given = [t for t in tangents if not isinstance(t, ad.Zero)]

    def rule(*arrays: Any) -> Any:
        rest = iter(arrays[len(primals) :])
        taken = [t if isinstance(t, ad.Zero) else next(rest) for t in tangents]
        return ad.primitive_jvps[of_jax](arrays[: len(primals)], taken, **params)

    return binding_own(own, rule, [*primals, *given])


def _transpose(
    own: Primitives, of_jax: Primitive, cotangent: Any, /, *operands: Any, **params: Any
) -> Any:
    rule = partial(ad.primitive_transposes[of_jax], **params)
    if isinstance(cotangent, ad.Zero):
        return rule(cotangent, *operands)
    linear = list(map(ad.is_undefined_primal, operands))
    given = [x for x, is_linear in zip(operands, linear, strict=True) if not is_linear]

    def of_arrays(cotangent: Any, *arrays: Any) -> Any:
        rest, pairs = iter(arrays), zip(operands, linear, strict=True)
        taken = [x if is_linear else next(rest) for x, is_linear in pairs]
        return rule(cotangent, *taken)

    return binding_own(own, of_arrays, [cotangent, *given])


def _batch(
    own: Primitives,
    of_jax: Primitive,
    axis_data: Any,
    arrays: Sequence[Any],
    dims: Any,
    /,
    **params: Any,
) -> Any:
    def rule(*arrays: Any) -> Any:
        batcher = batching.fancy_primitive_batchers[of_jax]
        return batcher(axis_data, arrays, dims, **params)

    return binding_own(own, rule, arrays)


def binding_own(own: Primitives, rule: Operation, arrays: Sequence[Any]) -> Any:
    """What a rule of JAX's gives for some arrays, with jamp's primitives in it."""
    static: list[Any] = []

    def arrays_made(*arrays: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(rule(*arrays), _is_static)
        static[:] = tree, [leaf if _is_static(leaf) else None for leaf in leaves]
        return [leaf for leaf in leaves if not _is_static(leaf)]

    program = jax.make_jaxpr(arrays_made)(*map(jax.typeof, arrays))
    program = replaced(
        program,
        lambda eqn: eqn.primitive in own,
        lambda eqn: eqn.replace(primitive=own[eqn.primitive]),
        {},
    )
    outs = iter(jaxpr_as_fun(program)(*arrays))
    tree, leaves = static
    return tree.unflatten([next(outs) if leaf is None else leaf for leaf in leaves])


def _is_static(leaf: Any) -> bool:
    """Whether a rule's result is no array: a zero tangent, or an axis."""
    return isinstance(leaf, ad.Zero | int)

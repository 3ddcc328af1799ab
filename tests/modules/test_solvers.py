"""Diffrax, Optimistix and Lineax train under autocast, where these are installed.

They are no part of the `test` extra: three packages for one slow file. `pip install
diffrax optimistix lineax` and `pytest tests/modules/test_solvers.py -m slow` run it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import jamp

eqx = pytest.importorskip("equinox")
dfx = pytest.importorskip("diffrax")
lx = pytest.importorskip("lineax")
optx = pytest.importorskip("optimistix")

pytestmark = pytest.mark.slow

Y0 = jax.random.normal(jax.random.key(1), (2,))
TARGET = jnp.array([0.3, -0.7])
STEPS = 5
PID = dfx.PIDController(rtol=1e-3, atol=1e-4)


def squared(y):
    return jnp.mean((y - TARGET).astype(jnp.float32) ** 2)


def field(t, y, model):
    return model(y) - y


def solved(model, terms=None, solver=None, t1=1.0, **options):
    """The loss at the end of a differential equation that has the model in it."""
    terms = dfx.ODETerm(field) if terms is None else terms
    solver = dfx.Tsit5() if solver is None else solver
    solution = dfx.diffeqsolve(
        terms, solver, 0.0, t1, 0.25, Y0, args=model, max_steps=256, **options
    )
    return squared(solution.ys[-1])


def implicit(model):
    event = dfx.Event(dfx.steady_state_event())
    options = {"adjoint": dfx.ImplicitAdjoint(), "stepsize_controller": PID}
    return solved(model, t1=30.0, event=event, **options)


def controlled(model):
    ts = jnp.linspace(0.0, 1.0, 5)
    path = jnp.stack([ts, jnp.sin(3 * ts)], axis=1)
    coefficients = dfx.backward_hermite_coefficients(ts, path)
    control = dfx.CubicInterpolation(ts, coefficients)
    term = dfx.ControlTerm(lambda t, y, model: jnp.outer(model(y), y + 1), control)
    return solved(model, term.to_ode())


def stochastic(model):
    key = jax.random.key(5)
    noise = dfx.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(2,), key=key)
    diffusion = dfx.ControlTerm(lambda t, y, model: jnp.diag(0.1 * model(y)), noise)
    return solved(model, dfx.MultiTerm(dfx.ODETerm(field), diffusion), dfx.Euler())


def at_root(solver):
    def loss(model):
        found = optx.root_find(lambda y, model: model(y) - 2 * y, solver, Y0, model)
        return squared(found.value)

    return loss


def at_fixed_point(model):
    solver = optx.FixedPointIteration(1e-3, 1e-3)
    found = optx.fixed_point(lambda y, model: 0.3 * model(y), solver, Y0, model)
    return squared(found.value)


def at_least_squares(solver):
    def loss(model):
        def residuals(y, model):
            return model(y) - 2 * y + 0.1

        return squared(optx.least_squares(residuals, solver, Y0, model).value)

    return loss


def at_minimum(model):
    def objective(y, model):
        return jnp.sum((model(y) - 2 * y) ** 2)

    return squared(optx.minimise(objective, optx.BFGS(1e-3, 1e-3), Y0, model).value)


def matrix(model):
    return 3 * jnp.eye(2) + jax.vmap(model)(jnp.eye(2))


def linear(solver):
    def loss(model):
        operator = lx.MatrixLinearOperator(matrix(model))
        return squared(lx.linear_solve(operator, model(Y0), solver=solver).value)

    return loss


def conjugate(model):
    a = matrix(model)
    operator = lx.FunctionLinearOperator(
        lambda v: a.T @ (a @ v) + v,
        jax.ShapeDtypeStruct((2,), jnp.float32),
        tags=lx.positive_semidefinite_tag,
    )
    return squared(lx.linear_solve(operator, Y0, solver=lx.CG(1e-4, 1e-4)).value)


LOSSES = {
    "euler": functools.partial(solved, solver=dfx.Euler()),
    "tsit5": solved,
    "adaptive": functools.partial(solved, stepsize_controller=PID),
    "stiff": functools.partial(solved, solver=dfx.Kvaerno3(), stepsize_controller=PID),
    "recursive": functools.partial(
        solved, adjoint=dfx.RecursiveCheckpointAdjoint(checkpoints=3)
    ),
    "direct": functools.partial(solved, adjoint=dfx.DirectAdjoint()),
    "backsolve": functools.partial(solved, adjoint=dfx.BacksolveAdjoint()),
    "implicit": implicit,
    "controlled": controlled,
    "stochastic": stochastic,
    # It cannot get nearer to a root than the roundoff of the dtype.
    "newton": at_root(optx.Newton(1e-2, 1e-2)),
    "fixed point": at_fixed_point,
    "levenberg-marquardt": at_least_squares(optx.LevenbergMarquardt(1e-4, 1e-4)),
    "gauss-newton": at_least_squares(optx.GaussNewton(1e-2, 1e-2)),
    "bfgs": at_minimum,
    "lu": linear(lx.LU()),
    "least squares": linear(lx.AutoLinearSolver(well_posed=False)),
    "conjugate gradients": conjugate,
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_model_inside_a_solver_trains(name, dtype):
    loss = LOSSES[name]
    fn = eqx.filter_value_and_grad(jamp.autocast(loss, dtype=dtype))
    low = eqx.filter_jit(fn)
    key = jax.random.key(0)
    model = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=key)

    _, exact = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    losses = []
    for step in range(STEPS):
        value, gradients = low(model)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))
        if step == 0:
            assert distance(gradients, exact) < 4 * float(jnp.finfo(dtype).eps)
        losses.append(float(value))
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def distance(tree, other):
    """How far one tree of arrays is from another, relative to its norm."""
    one, two = (jax.flatten_util.ravel_pytree(t)[0] for t in (tree, other))
    return float(jnp.linalg.norm(one - two) / jnp.linalg.norm(two))

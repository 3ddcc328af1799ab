"""Differential equations, root finding, least squares, linear systems."""

from typing import Any

import jax
import jax.numpy as jnp

from ecosystem_programs import Training, program

KEY = jax.random.key(0)
TIMES = jnp.linspace(0.0, 1.0, 16)
STARTS = jax.random.normal(jax.random.key(1), (16, 2))
SPIRALS = jnp.stack(
    [
        STARTS
        * jnp.exp(-t)
        @ jnp.array(
            [[jnp.cos(3 * t), -jnp.sin(3 * t)], [jnp.sin(3 * t), jnp.cos(3 * t)]]
        )
        for t in TIMES
    ],
    1,
)


def field(key: Any, size: int = 2, out: int = 2) -> tuple[Any, Any]:
    import equinox as eqx

    mlp = eqx.nn.MLP(size, out, 32, 2, jax.nn.softplus, key=key)
    found: tuple[Any, Any] = eqx.partition(mlp, eqx.is_inexact_array)
    return found


def neural_ode(solver: Any, adjoint: Any, controller: Any = None) -> Training:
    import diffrax
    import equinox as eqx

    params, static = field(KEY)

    def solve(params: Any, start: Any) -> Any:
        network = eqx.combine(params, static)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: args(y)),
            solver,
            t0=0.0,
            t1=1.0,
            dt0=1 / 16,
            y0=start,
            args=network,
            saveat=diffrax.SaveAt(ts=TIMES),
            stepsize_controller=controller or diffrax.ConstantStepSize(),
            adjoint=adjoint,
            max_steps=64,
        ).ys

    def loss(params: Any, batch: Any) -> Any:
        paths = jax.vmap(lambda start: solve(params, start))(batch[:, 0])
        return jnp.mean((paths - batch) ** 2)

    return Training(loss, params, SPIRALS)


@program("diffrax")
def diffrax_euler() -> Training:
    """A neural ODE by Euler's method, differentiated through its checkpoints."""
    import diffrax

    return neural_ode(diffrax.Euler(), diffrax.RecursiveCheckpointAdjoint())


@program("diffrax")
def diffrax_tsit5_adaptive() -> Training:
    """A neural ODE by Tsit5 with adaptive steps."""
    import diffrax

    controller = diffrax.PIDController(rtol=1e-2, atol=1e-3)
    adjoint = diffrax.RecursiveCheckpointAdjoint()
    return neural_ode(diffrax.Tsit5(), adjoint, controller)


@program("diffrax")
def diffrax_direct_adjoint() -> Training:
    """A neural ODE by Heun's method, differentiated step by step."""
    import diffrax

    return neural_ode(diffrax.Heun(), diffrax.DirectAdjoint())


@program("diffrax")
def diffrax_backsolve_adjoint() -> Training:
    """A neural ODE whose gradient is another ODE, solved backwards."""
    import diffrax

    return neural_ode(diffrax.Tsit5(), diffrax.BacksolveAdjoint())


@program("diffrax")
def diffrax_controlled() -> Training:
    """A neural controlled differential equation that classifies paths."""
    import diffrax
    import equinox as eqx

    params, static = field(KEY, 8, 8 * 3)
    labels = (STARTS[:, 0] > 0).astype(jnp.float32)

    def loss(params: Any, batch: Any) -> Any:
        network = eqx.combine(params, static)

        def change(t: Any, y: Any, args: Any) -> Any:
            return jnp.tanh(network(y)).reshape(8, 3)

        def classify(path: Any) -> Any:
            timed = jnp.concatenate([TIMES[:, None], path], 1)
            coefficients = diffrax.backward_hermite_coefficients(TIMES, timed)
            term = diffrax.ControlTerm(
                change,
                diffrax.CubicInterpolation(TIMES, coefficients),
            ).to_ode()
            solution = diffrax.diffeqsolve(
                term, diffrax.Tsit5(), 0.0, 1.0, 1 / 16, jnp.tile(path[0], 4)
            )
            return solution.ys[-1, 0]

        logits = jax.vmap(classify)(batch)
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

    return Training(loss, params, SPIRALS)


@program("diffrax")
def diffrax_stochastic() -> Training:
    """A stochastic differential equation, its drift fitted to a mean path."""
    import diffrax
    import equinox as eqx

    params, static = field(KEY)

    def loss(params: Any, batch: Any) -> Any:
        network = eqx.combine(params, static)

        def path(start: Any, key: Any) -> Any:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (2,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: network(y)),
                diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(2), noise),
            )
            return diffrax.diffeqsolve(
                terms,
                diffrax.EulerHeun(),
                0.0,
                1.0,
                1 / 16,
                start,
                saveat=diffrax.SaveAt(ts=TIMES),
            ).ys

        keys = jax.random.split(KEY, len(batch))
        return jnp.mean((jax.vmap(path)(batch[:, 0], keys) - batch) ** 2)

    return Training(loss, params, SPIRALS)


@program("optimistix")
def optimistix_equilibrium() -> Training:
    """A deep equilibrium model: a fixed point, differentiated implicitly."""
    import optimistix as optx

    inputs = jax.random.normal(KEY, (16, 8))
    params = {"w": jnp.eye(8) * 0.3, "u": jnp.eye(8), "v": jnp.ones(8) / 8}

    def loss(params: Any, batch: Any) -> Any:
        def apply(z: Any, x: Any) -> Any:
            return jnp.tanh(params["w"] @ z + params["u"] @ x)

        solver = optx.FixedPointIteration(rtol=1e-2, atol=1e-2)

        def one(x: Any) -> Any:
            found = optx.fixed_point(apply, solver, jnp.zeros(8), x, throw=False)
            return found.value @ params["v"]

        return jnp.mean((jax.vmap(one)(batch) - jnp.sin(batch.sum(1))) ** 2)

    return Training(loss, params, inputs)


@program("optimistix")
def optimistix_least_squares() -> Training:
    """Outer parameters of a least-squares fit, differentiated through its solution."""
    import optimistix as optx

    x = jnp.linspace(-1, 1, 32)
    y = jnp.cos(5 * x) + 0.5 * jnp.cos(2 * x)

    def loss(params: Any, batch: Any) -> Any:
        def residuals(coefficients: Any, args: Any) -> Any:
            features = jnp.cos(params["frequency"] * batch[0][:, None])
            return features @ coefficients - batch[1]

        solver = optx.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
        found = optx.least_squares(residuals, solver, jnp.zeros(2), throw=False)
        return jnp.mean(residuals(found.value, None) ** 2)

    return Training(loss, {"frequency": jnp.array([1.0, 4.0])}, (x, y))


@program("lineax")
def lineax_solve() -> Training:
    """A linear system of a learned matrix, solved by LU and by conjugate gradients."""
    import lineax as lx

    b = jax.random.normal(KEY, (16, 8))

    def loss(params: Any, batch: Any) -> Any:
        matrix = params @ params.T + jnp.eye(8)
        operator = lx.MatrixLinearOperator(matrix)
        positive = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        iterated = lx.CG(rtol=1e-3, atol=1e-3)

        def one(b: Any) -> Any:
            direct = lx.linear_solve(operator, b, lx.LU()).value
            other = lx.linear_solve(positive, b, iterated, throw=False).value
            return jnp.sum((direct + other - b) ** 2)

        return jnp.mean(jax.vmap(one)(batch))

    return Training(loss, jnp.eye(8) * 0.1 + 0.01, b)


@program("jaxopt")
def jaxopt_ridge() -> Training:
    """Ridge regression by jaxopt, its regularisation learned implicitly."""
    import jaxopt

    x = jax.random.normal(KEY, (32, 8))
    y = x @ jnp.ones(8) + jax.random.normal(jax.random.key(5), (32,))

    def objective(w: Any, strength: Any, data: Any) -> Any:
        x, y = data
        return jnp.mean((x @ w - y) ** 2) + jnp.exp(strength) * jnp.sum(w**2)

    def loss(params: Any, batch: Any) -> Any:
        solver = jaxopt.GradientDescent(objective, maxiter=50, implicit_diff=True)
        train = (batch[0][:16], batch[1][:16])
        w = solver.run(jnp.zeros(8), params, train).params
        return jnp.mean((batch[0][16:] @ w - batch[1][16:]) ** 2)

    return Training(loss, jnp.float32(1.0), (x, y), learning_rate=0.1, steps=20)

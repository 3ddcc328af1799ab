"""Programs with packages of probability: densities, sampling, Gaussian processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ecosystem_programs import Computation, Training, program
from ecosystem_programs.parts import Array, dense, normals


def regression(points: int = 128, features: int = 8) -> tuple[Array, Array]:
    x, noise = normals(points, features), normals(points, seed=1)
    return x, x @ normals(features, seed=2) + 0.1 * noise


def classification(points: int = 128, features: int = 8) -> tuple[Array, Array]:
    x, scores = regression(points, features)
    return x, (scores > 0).astype(jnp.float32)


def two_moons(points: int = 256) -> Array:
    angle = jnp.linspace(0, np.pi, points // 2)
    upper = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
    lower = jnp.stack([1 - jnp.cos(angle), 0.5 - jnp.sin(angle)], 1)
    return jnp.concatenate([upper, lower]) + 0.05 * normals(points, 2)


def waves(points: int = 64) -> tuple[Array, Array]:
    x = jnp.linspace(0, 6, points)
    return x, jnp.sin(2 * x) + 0.1 * normals(points)


@program("numpyro")
def numpyro_svi() -> Training:
    """A Bayesian neural network's ELBO with a normal guide."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any) -> None:
        hidden = numpyro.sample("w", dist.Normal(0, 1).expand([8, 16]).to_event(2))
        out = numpyro.sample("v", dist.Normal(0, 1).expand([16]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ hidden) @ out, scale), obs=y)

    elbo = Trace_ELBO(num_particles=4)
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), elbo)
    batch = regression()
    key = jax.random.key(0)
    state = svi.init(key, *batch)

    def loss(params: Any, batch: Any) -> Array:
        params = svi.constrain_fn(params)
        return elbo.loss(key, params, svi.model, svi.guide, *batch) / len(batch[0])

    return Training(loss, svi.optim.get_params(state.optim_state), batch)


@program("numpyro")
def numpyro_nuts() -> Computation:
    """Steps of the no-U-turn sampler on a logistic regression."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([8]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    batch = classification()
    kernel = NUTS(model, step_size=0.05, max_tree_depth=4, adapt_step_size=False)
    state = kernel.init(jax.random.key(0), 0, None, batch, {})

    def sample(state: Any, x: Any, y: Any) -> Any:
        def step(state: Any, _: None) -> Any:
            state = kernel.sample(state, (x, y), {})
            return state, (state.z["w"], state.potential_energy)

        return jax.lax.scan(step, state, None, 3)[1]

    return Computation(sample, (state, *batch))


@program("numpyro")
def numpyro_density() -> Computation:
    """The potential energy of a hierarchical model and its gradient."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    def model(x: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("features", x.shape[1]):
            w = numpyro.sample("w", dist.Normal(mean, scale))
        numpyro.sample("y", dist.StudentT(4.0, x @ w, 0.5), obs=y)

    batch = regression()
    info = initialize_model(
        jax.random.key(0), model, model_args=batch, dynamic_args=True
    )

    def energy(z: Any, x: Any, y: Any) -> Any:
        return jax.value_and_grad(info.potential_fn(x, y))(z)

    return Computation(energy, (info.param_info.z, *batch))


@program("flowjax")
def flowjax_spline() -> Training:
    """A neural spline flow with coupling layers fitted to two moons."""
    import equinox as eqx
    import paramax
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    flow = coupling_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(2)),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        flow_layers=3,
        nn_width=32,
    )
    return likelihood(eqx, paramax, flow)


@program("flowjax")
def flowjax_autoregressive() -> Training:
    """A masked autoregressive flow fitted to two moons."""
    import equinox as eqx
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(2)), flow_layers=3, nn_width=32
    )
    return likelihood(eqx, paramax, flow)


def likelihood(eqx: Any, paramax: Any, flow: Any) -> Training:
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )

    def loss(params: Any, batch: Any) -> Array:
        return -paramax.unwrap(eqx.combine(params, static)).log_prob(batch).mean()

    return Training(loss, params, two_moons())


@program("distrax")
def distrax_mixture() -> Training:
    """A mixture of normals fitted to two moons."""
    import distrax

    params = {
        "logits": jnp.zeros(8),
        "mean": normals(8, 2),
        "scale": jnp.zeros((8, 2)),
    }

    def loss(params: Any, batch: Any) -> Array:
        mixture = distrax.MixtureSameFamily(
            distrax.Categorical(logits=params["logits"]),
            distrax.MultivariateNormalDiag(params["mean"], jnp.exp(params["scale"])),
        )
        return -mixture.log_prob(batch).mean()

    return Training(loss, params, two_moons(), learning_rate=3e-2)


@program("distrax")
def distrax_vae() -> Training:
    """A variational autoencoder of binary images."""
    import distrax

    def drawn(number: int, inputs: int, outputs: int) -> Any:
        return dense(inputs, outputs, number), jnp.zeros(outputs)

    params = {
        "encode": drawn(1, 64, 32),
        "mean": drawn(2, 32, 4),
        "scale": drawn(3, 32, 4),
        "decode": drawn(4, 4, 32),
        "image": drawn(5, 32, 64),
    }

    def loss(params: Any, batch: Any) -> Array:
        def layer(name: str, x: Array) -> Array:
            w, b = params[name]
            return x @ w + b

        hidden = jax.nn.relu(layer("encode", batch))
        scale = jax.nn.softplus(layer("scale", hidden))
        posterior = distrax.MultivariateNormalDiag(layer("mean", hidden), scale)
        prior = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        z = posterior.sample(seed=jax.random.key(0))
        logits = layer("image", jax.nn.relu(layer("decode", z)))
        image = distrax.Independent(distrax.Bernoulli(logits=logits), 1)
        return jnp.mean(posterior.kl_divergence(prior) - image.log_prob(batch))

    images = (normals(64, 4) @ normals(4, 64, seed=9) > 0).astype(jnp.float32)
    return Training(loss, params, images)


@program("blackjax")
def blackjax_hmc() -> Computation:
    """A short Hamiltonian chain on a logistic regression."""
    import blackjax

    def sample(x: Any, y: Any) -> Any:
        def density(w: Array) -> Array:
            logits = x @ w
            fit = jnp.sum(y * logits - jax.nn.softplus(logits))
            return fit - 0.5 * jnp.sum(w**2)

        kernel = blackjax.hmc(density, 0.02, jnp.ones(8), 5)

        def step(state: Any, key: Array) -> Any:
            state, info = kernel.step(key, state)
            return state, (state.position, state.logdensity, info.acceptance_rate)

        keys = jax.random.split(jax.random.key(0), 5)
        return jax.lax.scan(step, kernel.init(jnp.zeros(8)), keys)[1]

    return Computation(sample, classification())


@program("blackjax")
def blackjax_window() -> Computation:
    """Stan's window adaptation of a NUTS sampler of a linear regression."""
    import blackjax

    def adapt(x: Any, y: Any) -> Any:
        def density(w: Array) -> Array:
            return -0.5 * jnp.sum((y - x @ w) ** 2) - 0.5 * jnp.sum(w**2)

        adaptation = blackjax.window_adaptation(blackjax.nuts, density)
        found, _ = adaptation.run(jax.random.key(0), jnp.zeros(8), 40)
        return found.state.position, found.parameters["step_size"]

    return Computation(adapt, regression())


def of_dynamax(model: Any, params: Any, props: Any, emissions: Any) -> Training:
    from dynamax.parameters import from_unconstrained, to_unconstrained

    def loss(params: Any, batch: Any) -> Array:
        params = from_unconstrained(params, props)
        return -model.marginal_log_prob(params, batch) / len(batch)

    return Training(loss, to_unconstrained(params, props), emissions, 3e-2)


@program("dynamax")
def dynamax_hmm() -> Training:
    """A hidden Markov model with Gaussian emissions, by its marginal likelihood."""
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(3, 2)
    emissions = two_moons(64)
    params, props = model.initialize(
        jax.random.key(0),
        emission_means=normals(3, 2),
        emission_covariances=jnp.tile(jnp.eye(2), (3, 1, 1)),
    )

    return of_dynamax(model, params, props, emissions)


@program("dynamax")
def dynamax_kalman() -> Training:
    """A linear Gaussian state space model, by a Kalman filter's likelihood."""
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(4, 2)
    params, props = model.initialize(jax.random.key(0))
    emissions = jnp.cumsum(0.3 * normals(48, 2), 0)

    return of_dynamax(model, params, props, emissions)


@program("tinygp")
def tinygp_likelihood() -> Training:
    """A Gaussian process's hyperparameters by its marginal likelihood."""
    from tinygp import GaussianProcess, kernels

    params = {"amplitude": jnp.zeros(()), "scale": jnp.ones(()), "noise": jnp.zeros(())}

    def loss(params: Any, batch: Any) -> Array:
        x, y = batch
        params = jax.tree.map(jnp.exp, params)
        kernel = params["amplitude"] * kernels.Matern52(params["scale"])
        process = GaussianProcess(kernel, x, diag=params["noise"])
        return -process.log_probability(y) / len(x)

    return Training(loss, params, waves(), learning_rate=0.1)


@program("gpjax")
def gpjax_likelihood() -> Training:
    """A conjugate Gaussian process by its marginal likelihood."""
    import equinox as eqx
    import gpjax as gpx

    x, y = waves()
    prior = gpx.gps.Prior(
        mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF()
    )
    posterior = prior * gpx.likelihoods.Gaussian()
    params, static = eqx.partition(posterior, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Array:
        x, y = batch
        model = eqx.combine(params, static)
        data = gpx.Dataset(X=x[:, None], y=y[:, None])
        return -gpx.objectives.conjugate_mll(model, data) / len(x)

    return Training(loss, params, (x, y), learning_rate=0.05)


@program("tfp-nightly")
def tfp_regression() -> Training:
    """A robust regression with a joint distribution's log probability."""
    from tensorflow_probability.substrates import jax as tfp

    tfd, tfb = tfp.distributions, tfp.bijectors

    def loss(params: Any, batch: Any) -> Array:
        x, y = batch
        scale = tfb.Softplus().forward(params["scale"])
        prior = tfd.Sample(tfd.Laplace(0.0, 1.0), 8)
        outcome = tfd.Independent(tfd.StudentT(4.0, x @ params["w"], scale), 1)
        total = outcome.log_prob(y) + prior.log_prob(params["w"])
        return -total / len(x)

    params = {"w": jnp.zeros(8), "scale": jnp.ones(())}
    return Training(loss, params, regression(), learning_rate=3e-2)


@program("tfp-nightly")
def tfp_flow() -> Training:
    """A RealNVP of three couplings fitted to two moons."""
    from tensorflow_probability.substrates import jax as tfp

    tfd, tfb = tfp.distributions, tfp.bijectors

    def coupling(index: int) -> Any:
        first = normals(1, 32, seed=2 * index)
        return first, jnp.zeros(32), 0.1 * normals(32, 2, seed=2 * index + 1)

    def loss(params: Any, batch: Any) -> Array:
        def layer(weights: Any) -> Any:
            first, bias, second = weights

            def shift_and_log_scale(x: Array, _: int, **kwargs: Any) -> Any:
                out = jnp.tanh(x @ first + bias) @ second
                return out[..., :1], jnp.tanh(out[..., 1:])

            return tfb.RealNVP(1, shift_and_log_scale_fn=shift_and_log_scale)

        steps: list[Any] = []
        for weights in params:
            steps += [layer(weights), tfb.Permute([1, 0])]
        base = tfd.MultivariateNormalDiag(jnp.zeros(2), jnp.ones(2))
        flow = tfd.TransformedDistribution(base, tfb.Chain(steps))
        return -flow.log_prob(batch).mean()

    return Training(loss, [coupling(i) for i in range(3)], two_moons())


@program("tfp-nightly")
def tfp_hmc() -> Computation:
    """A chain of Hamiltonian Monte Carlo with step size adaptation."""
    from tensorflow_probability.substrates import jax as tfp

    def sample(x: Any, y: Any) -> Any:
        def density(w: Array) -> Array:
            outcome = tfp.distributions.Bernoulli(logits=x @ w)
            return jnp.sum(outcome.log_prob(y)) - 0.5 * jnp.sum(w**2)

        kernel = tfp.mcmc.SimpleStepSizeAdaptation(
            tfp.mcmc.HamiltonianMonteCarlo(density, 0.02, 5), 3
        )
        return tfp.mcmc.sample_chain(
            5, jnp.zeros(8), kernel=kernel, seed=jax.random.key(0), trace_fn=None
        )

    return Computation(sample, classification())

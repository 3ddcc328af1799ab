"""Programs with packages of agents: environments, search, evolution, reinforcement."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ecosystem_programs import Computation, Training, program
from ecosystem_programs.parts import Array, apply, dense, normals


def network(*sizes: int) -> list[tuple[Array, Array]]:
    pairs = enumerate(pairwise(sizes))
    return [(dense(a, b, i), 0.1 * normals(b, seed=i + 9)) for i, (a, b) in pairs]


@program("mctx")
def mctx_muzero() -> Computation:
    """A Gumbel MuZero search with a learned model."""
    import mctx

    params = {"model": network(8 + 4, 32, 8), "heads": network(8, 32, 4 + 2)}

    def search(params: Any, embedding: Array) -> Any:
        def predict(params: Any, embedding: Array) -> Any:
            out = apply(params["heads"], embedding)
            return out[:, :4], out[:, 4], out[:, 5]

        def recur(params: Any, _: Any, action: Array, embedding: Array) -> Any:
            x = jnp.concatenate([embedding, jax.nn.one_hot(action, 4)], -1)
            embedding = jnp.tanh(apply(params["model"], x))
            logits, value, reward = predict(params, embedding)
            discount = jnp.full_like(reward, 0.9)
            found = mctx.RecurrentFnOutput(
                reward=reward, discount=discount, prior_logits=logits, value=value
            )
            return found, embedding

        logits, value, _ = predict(params, embedding)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=embedding)
        found = mctx.gumbel_muzero_policy(
            params, jax.random.key(0), root, recur, num_simulations=12
        )
        return found.action_weights, found.search_tree.summary().value

    return Computation(search, (params, normals(4, 8)))


@program("rlax")
def rlax_double_q() -> Training:
    """Double Q-learning on random transitions."""
    import rlax

    def loss(params: Any, batch: Any) -> Array:
        before, action, reward, after = batch
        error = jax.vmap(rlax.double_q_learning)(
            apply(params, before),
            action,
            reward,
            jnp.full_like(reward, 0.5),
            apply(target, after),
            apply(params, after),
        )
        return jnp.mean(rlax.huber_loss(error))

    target = network(8, 64, 64, 4)
    action = jax.random.randint(jax.random.key(0), (128,), 0, 4)
    states, after = normals(128, 8), normals(128, 8, seed=1)
    batch = states, action, states[:, 0] + action, after
    return Training(loss, network(8, 64, 64, 4), batch)


@program("rlax")
def rlax_actor_critic() -> Training:
    """An actor and a critic with V-trace targets and an entropy term."""
    import rlax

    def loss(params: Any, batch: Any) -> Array:
        observations, actions, rewards, behaviour = batch

        def episode(observations: Array, actions: Array, rewards: Array) -> Array:
            logits = apply(params["actor"], observations)[:-1]
            values = apply(params["critic"], observations)[:, 0]
            rho = rlax.categorical_importance_sampling_ratios(
                logits, jnp.full_like(logits, behaviour), actions
            )
            found = rlax.vtrace_td_error_and_advantage(
                values[:-1], values[1:], rewards, jnp.full_like(rewards, 0.9), rho
            )
            weights = jnp.ones_like(rewards)
            policy = rlax.policy_gradient_loss(
                logits, actions, found.pg_advantage, weights
            )
            entropy = rlax.entropy_loss(logits, weights)
            return policy + 0.5 * jnp.mean(found.errors**2) + 0.01 * entropy

        return jnp.mean(jax.vmap(episode)(observations, actions, rewards))

    observations = normals(16, 21, 8)
    actions = jax.random.randint(jax.random.key(0), (16, 20), 0, 4)
    rewards = 1 + jnp.where(actions == 1, observations[:, 1:, 0], 0)
    batch = observations, actions, rewards, jnp.log(0.25)
    params = {"actor": network(8, 32, 4), "critic": network(8, 32, 1)}
    return Training(loss, params, batch)


@program("brax")
def brax_pendulum() -> Computation:
    """A policy in the inverted pendulum, with generalized coordinates."""
    from brax import envs

    env = envs.get_environment("inverted_pendulum", backend="generalized")

    def rollout(params: Any, key: Array) -> Any:
        def step(state: Any, _: None) -> Any:
            state = env.step(state, jnp.tanh(apply(params, state.obs)))
            return state, (state.obs, state.reward)

        return jax.lax.scan(step, env.reset(key), None, 10)[1]

    params = network(env.observation_size, 32, env.action_size)
    return Computation(rollout, (params, jax.random.key(0)))


@program("brax")
def brax_ppo() -> Training:
    """The loss of proximal policy optimization with Brax's networks."""
    from brax.training import types
    from brax.training.agents.ppo import losses, networks

    ppo = networks.make_ppo_networks(
        8, 2, policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(32, 32)
    )
    params = losses.PPONetworkParams(
        policy=ppo.policy_network.init(jax.random.key(0)),
        value=ppo.value_network.init(jax.random.key(1)),
    )
    observation, raw = normals(16, 10, 8), normals(16, 10, 2, seed=1)
    data = types.Transition(
        observation=observation,
        action=jnp.tanh(raw),
        reward=observation[..., 0] + raw[..., 0],
        discount=jnp.ones((16, 10)),
        next_observation=normals(16, 10, 8, seed=2),
        extras={
            "state_extras": {"truncation": jnp.zeros((16, 10))},
            "policy_extras": {
                "raw_action": raw,
                "log_prob": jnp.full((16, 10), -2.0),
                "distribution_params": normals(16, 10, 4, seed=3),
            },
        },
    )

    def loss(params: Any, batch: Any) -> Array:
        key = jax.random.key(2)
        found: Array = losses.compute_ppo_loss(params, (), batch, key, ppo)[0]
        return found

    return Training(loss, params, data)


@program("gymnax")
def gymnax_rollout() -> Computation:
    """A policy in 16 cart poles."""
    import gymnax

    env, settings = gymnax.make("CartPole-v1")

    def rollout(params: Any, keys: Array) -> Any:
        def episode(key: Array) -> Any:
            def step(carry: Any, key: Array) -> Any:
                obs, state = carry
                action = jnp.argmax(apply(params, obs))
                obs, state, reward, *_ = env.step(key, state, action, settings)
                return (obs, state), (obs, reward)

            start = env.reset(key, settings)
            return jax.lax.scan(step, start, jax.random.split(key, 10))[1]

        return jax.vmap(episode)(keys)

    keys = jax.random.split(jax.random.key(0), 16)
    return Computation(rollout, (network(4, 32, 2), keys))


@program("gymnax")
def gymnax_pendulum() -> Training:
    """A policy trained through the dynamics of a pendulum."""
    import gymnax

    env, settings = gymnax.make("Pendulum-v1")

    def loss(params: Any, keys: Array) -> Array:
        def episode(key: Array) -> Array:
            def step(carry: Any, key: Array) -> Any:
                obs, state = carry
                action = 2 * jnp.tanh(apply(params, obs))
                obs, state, reward, *_ = env.step_env(key, state, action, settings)
                return (obs, state), reward

            start = env.reset_env(key, settings)
            rewards = jax.lax.scan(step, start, jax.random.split(key, 50))[1]
            return -jnp.mean(rewards)

        return jnp.mean(jax.vmap(episode)(keys))

    keys = jax.random.split(jax.random.key(0), 32)
    return Training(loss, network(3, 32, 1), keys, learning_rate=3e-2)


@program("evosax")
def evosax_cma() -> Computation:
    """Generations of CMA-ES on Rosenbrock's function."""
    from evosax.algorithms import CMA_ES

    strategy = CMA_ES(population_size=16, solution=jnp.zeros(4))
    settings = strategy.default_params

    def minimize(start: Array, key: Array) -> Array:
        def generation(state: Any, key: Array) -> Any:
            ask, tell = jax.random.split(key)
            x, state = strategy.ask(ask, state, settings)
            parts = 100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2
            fitness = parts.sum(1)
            state, _ = strategy.tell(tell, x, fitness, state, settings)
            return state, fitness.min()

        state = strategy.init(key, start, settings)
        return jax.lax.scan(generation, state, jax.random.split(key, 5))[1]

    return Computation(minimize, (jnp.zeros(4), jax.random.key(0)))


@program("evosax")
def evosax_openes() -> Computation:
    """Generations of OpenES on a network's regression."""
    import optax
    from evosax.algorithms import Open_ES

    params = network(8, 16, 1)
    strategy = Open_ES(population_size=32, solution=params, optimizer=optax.adam(0.02))
    settings = strategy.default_params

    def minimize(params: Any, x: Array, y: Array, key: Array) -> Array:
        def fitness(params: Any) -> Array:
            return jnp.mean((apply(params, x)[:, 0] - y) ** 2)

        def generation(state: Any, key: Array) -> Any:
            ask, tell = jax.random.split(key)
            population, state = strategy.ask(ask, state, settings)
            found = jax.vmap(fitness)(population)
            state, _ = strategy.tell(tell, population, found, state, settings)
            return state, found.mean()

        state = strategy.init(key, params, settings)
        return jax.lax.scan(generation, state, jax.random.split(key, 10))[1]

    x = normals(64, 8)
    return Computation(minimize, (params, x, jnp.sin(x[:, 0]), jax.random.key(0)))


@program("pgx")
def pgx_selfplay() -> Computation:
    """A policy network playing connect four against itself."""
    import pgx

    env = pgx.make("connect_four")

    def play(params: Any, keys: Array) -> Any:
        def move(state: Any, _: None) -> Any:
            flat = state.observation.reshape(len(keys), -1).astype(jnp.float32)
            out = apply(params, flat)
            logits = jnp.where(state.legal_action_mask, out[:, :7], -1e9)
            state = jax.vmap(env.step)(state, jnp.argmax(logits, -1))
            return state, (jax.nn.softmax(logits), jnp.tanh(out[:, 7]), state.rewards)

        return jax.lax.scan(move, jax.vmap(env.init)(keys), None, 8)[1]

    keys = jax.random.split(jax.random.key(0), 8)
    return Computation(play, (network(84, 32, 8), keys))


@program("jumanji")
def jumanji_snake() -> Computation:
    """A convolutional policy in Jumanji's snake."""
    import jumanji

    env = jumanji.make("Snake-v1", num_rows=6, num_cols=6)

    def play(params: Any, key: Array) -> Any:
        kernel, head = params

        def step(carry: Any, _: None) -> Any:
            state, seen = carry
            hidden = jax.lax.conv_general_dilated(
                seen.observation.grid[None].astype(jnp.float32),
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            logits = apply(head, jax.nn.relu(hidden).reshape(-1))
            masked = jnp.where(seen.observation.action_mask, logits, -jnp.inf)
            carry = env.step(state, jnp.argmax(masked))
            return carry, (logits, carry[1].reward)

        return jax.lax.scan(step, env.reset(key), None, 6)[1]

    params = normals(3, 3, 5, 8) / 7, network(288, 32, 4)
    return Computation(play, (params, jax.random.key(0)))


@program("evojax")
def evojax_cartpole() -> Computation:
    """A population of policies swinging up a cart pole."""
    from evojax.policy import MLPPolicy
    from evojax.task.cartpole import CartPoleSwingUp

    policy = MLPPolicy(input_dim=5, hidden_dims=[16, 16], output_dim=1)
    task = CartPoleSwingUp(max_steps=10)

    def evaluate(population: Array, keys: Array) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, memory = carry
            actions, memory = policy.get_actions(state, population, memory)
            state, reward, _ = task.step(state, actions)
            return (state, memory), (reward, actions)

        state = task.reset(keys)
        return jax.lax.scan(step, (state, policy.reset(state)), None, 10)[1]

    population = 0.3 * normals(8, policy.num_params)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    return Computation(evaluate, (population, keys))

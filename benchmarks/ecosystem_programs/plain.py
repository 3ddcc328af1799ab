"""Programs without a library of layers, as people write them in plain JAX and optax."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ecosystem_programs import Computation, Training, program
from ecosystem_programs.parts import Array, apply, dense, normals


def labels(number: int, *shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, number, shape))


def weights(**shapes: tuple[int, ...]) -> dict[str, Array]:
    return {
        name: normals(*shape, seed=seed) / np.sqrt(shape[-2] if shape[1:] else 1)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def network(*sizes: int, seed: int = 0) -> list[tuple[Array, Array]]:
    return [
        (dense(a, b, seed + i), jnp.zeros(b))
        for i, (a, b) in enumerate(pairwise(sizes))
    ]


@program("jax")
def plain_flash_attention() -> Training:
    """Causal attention in blocks of keys, by an online softmax in a scan."""
    batch, time, heads, size, block = 4, 64, 2, 16, 16

    def attend(q: Array, k: Array, v: Array) -> Array:
        def blocks(x: Array) -> Array:
            x = x.reshape(batch, heads, -1, block, size)
            return jnp.moveaxis(x, 2, 0)

        def step(carry: Any, part: Any) -> Any:
            most, total, found = carry
            keys, values, place = part
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, keys) / np.sqrt(size)
            seen = jnp.arange(time)[:, None] >= place * block + jnp.arange(block)
            scores = jnp.where(seen, scores, -1e30)
            new = jnp.maximum(most, scores.max(-1))
            exps, decay = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            found = found * decay[..., None] + exps @ values
            return (new, total * decay + exps.sum(-1), found), None

        shape = (batch, heads, time)
        start = jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, size))
        parts = blocks(k), blocks(v), jnp.arange(time // block)
        (_, total, found), _ = jax.lax.scan(jax.checkpoint(step), start, parts)
        return found / total[..., None]

    def loss(params: Any, tokens: Any) -> Array:
        x = params["embed"][tokens]
        qkv = (x @ params["qkv"]).reshape(batch, time, 3, heads, size)
        found = attend(*jnp.moveaxis(qkv, (2, 3), (0, 2)))
        x = x + jnp.moveaxis(found, 1, 2).reshape(batch, time, -1) @ params["out"]
        scores = jax.nn.log_softmax(x @ params["head"])[:, :-1]
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    params = weights(embed=(16, 32), qkv=(32, 96), out=(32, 32), head=(32, 16))
    return Training(loss, params, jnp.cumsum(labels(4, batch, time), 1) % 16)


@program("jax")
def plain_selective_state_space() -> Training:
    """A selective state space, as in Mamba, by an associative scan."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(params: Any, batch: Any) -> Array:
        inputs, wanted = batch
        scale = jax.lax.rsqrt(jnp.mean(inputs**2, -1, keepdims=True) + 1e-6)
        x, gate = jnp.split(inputs * scale @ params["enter"], 2, -1)
        x = jax.nn.silu(x)
        step = jax.nn.softplus(x @ params["step"] - 2)
        b, c = jnp.split(x @ params["state"], 2, -1)
        decay = jnp.exp(-step[..., None] * jnp.exp(params["decay"]))
        added = (step * x)[..., None] * b[..., None, :]
        states = jax.lax.associative_scan(combine, (decay, added), axis=1)[1]
        y = jnp.einsum("btds,bts->btd", states, c) + x
        out = inputs + (y * jax.nn.silu(gate)) @ params["leave"]
        return jnp.mean((out - wanted) ** 2)

    params = weights(enter=(8, 32), step=(16, 16), state=(16, 16), leave=(16, 8))
    params["decay"] = jnp.log(jnp.tile(jnp.arange(1.0, 9.0), (16, 1)))
    x = normals(4, 64, 8)
    return Training(loss, params, (x, jnp.cumsum(x, 1) / 4))


@program("jax")
def plain_long_convolution() -> Training:
    """A diagonal state space, as in S4D, by convolving with its kernel through FFTs."""
    time, size, states = 64, 8, 8

    def loss(params: Any, batch: Any) -> Array:
        inputs, wanted = batch
        u = inputs @ params["enter"]
        poles = -0.5 + 1j * jnp.pi * params["poles"]
        steps = poles * jnp.exp(params["step"])[:, None]
        parts = params["parts"][..., 0] + 1j * params["parts"][..., 1]
        parts = parts * (jnp.exp(steps) - 1) / poles
        powers = jnp.exp(steps[..., None] * jnp.arange(time))
        kernel = 2 * jnp.einsum("ds,dst->dt", parts, powers).real
        spectrum = jnp.fft.rfft(u, 2 * time, 1) * jnp.fft.rfft(kernel.T, 2 * time, 0)
        y = jnp.fft.irfft(spectrum, 2 * time, 1)[:, :time]
        return jnp.mean((inputs + jax.nn.gelu(y) @ params["leave"] - wanted) ** 2)

    params = weights(enter=(8, size), leave=(size, 8), step=(size,)) | {
        "parts": normals(size, states, 2, seed=9),
        "poles": jnp.tile(jnp.arange(float(states)), (size, 1)),
    }
    params["step"] = 0.5 * params["step"] - 3
    x = normals(4, time, 8)
    return Training(loss, params, (x, jnp.cumsum(x, 1) / 4))


@program("jax")
def plain_mixture_of_experts() -> Training:
    """A mixture of experts: the best two of four, dispatched by einsum."""
    experts, best, capacity = 4, 2, 48

    def loss(params: Any, batch: Any) -> Array:
        x, wanted = batch
        scores = x @ params["router"]
        chances = jax.nn.softmax(scores)
        gates, chosen = jax.lax.top_k(chances, best)
        gates = gates / gates.sum(-1, keepdims=True)
        hot = jax.nn.one_hot(chosen, experts)
        ranked = jnp.cumsum(hot.swapaxes(0, 1).reshape(-1, experts), 0)
        places = ranked.reshape(best, -1, experts).swapaxes(0, 1) * hot - 1
        dispatch = hot[..., None] * jax.nn.one_hot(places, capacity)
        taken = jnp.einsum("tkec,td->ecd", dispatch, x)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", taken, params["enter"]))
        made = jnp.einsum("ecf,efd->ecd", hidden, params["leave"])
        out = jnp.einsum("tkec,tk,ecd->td", dispatch, gates, made)
        balance = experts * jnp.sum(chances.mean(0) * hot[:, 0].mean(0))
        size = jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)
        return jnp.mean((out - wanted) ** 2) + 0.01 * balance + 0.001 * size

    params = weights(router=(8, 4), enter=(4, 8, 32), leave=(4, 32, 8))
    x = normals(64, 8)
    return Training(loss, params, (x, jnp.sin(2 * x)))


@program("optax")
def plain_speech() -> Training:
    """A network over frames trained by the CTC loss of optax."""
    import optax

    def loss(params: Any, batch: Any) -> Array:
        frames, tokens = batch
        logits = apply(params, frames, jax.nn.gelu)
        padding = jnp.zeros(frames.shape[:2]), jnp.zeros(tokens.shape)
        return jnp.mean(optax.ctc_loss(logits, padding[0], tokens, padding[1]))

    tokens = 1 + labels(7, 8, 6)
    frames = jnp.repeat(jax.nn.one_hot(tokens, 12), 4, 1) + 0.5 * normals(8, 24, 12)
    return Training(loss, network(12, 32, 8), (frames, tokens))


@program("jax")
def plain_transducer() -> Training:
    """An RNN transducer's loss: `logaddexp` over a lattice, by two nested scans."""

    def loss(params: Any, batch: Any) -> Array:
        frames, tokens = batch
        before = params["embed"][jnp.pad(tokens, ((0, 0), (1, 0)))]
        joint = jnp.tanh((frames @ params["encode"])[:, :, None] + before[:, None])
        scores = jax.nn.log_softmax(joint @ params["join"])
        blank, others = scores[..., 0], scores[:, :, :-1]
        emit = jnp.take_along_axis(others, tokens[:, None, :, None], -1)[..., 0]

        def next_token(first: Array, part: Any) -> Any:
            found = jnp.logaddexp(part[0], first + part[1])
            return found, found

        def next_frame(row: Array, part: Any) -> Any:
            stay = row + part[0]
            parts = stay[:, 1:].T, part[1].T
            rest = jax.lax.scan(next_token, stay[:, 0], parts)[1]
            return jnp.concatenate([stay[:, :1], rest.T], 1), None

        start = jnp.pad(jnp.cumsum(emit[:, 0], 1), ((0, 0), (1, 0)))
        parts = blank[:, :-1].swapaxes(0, 1), emit[:, 1:].swapaxes(0, 1)
        last, _ = jax.lax.scan(next_frame, start, parts)
        return -jnp.mean(last[:, -1] + blank[:, -1, -1])

    params = weights(encode=(12, 24), embed=(8, 24), join=(24, 8))
    tokens = 1 + labels(7, 4, 6)
    frames = jnp.repeat(jax.nn.one_hot(tokens, 12), 3, 1) + 0.5 * normals(4, 18, 12)
    return Training(loss, params, (frames, tokens))


@program("jax")
def plain_vector_quantisation() -> Training:
    """A VQ-VAE of unit vectors: the nearest code is passed straight through."""

    def loss(params: Any, batch: Any) -> Array:
        def unit(x: Array) -> Array:
            return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)

        found = unit(apply(params["encode"], batch, jax.nn.gelu))
        codes = unit(params["codes"])
        squares = jnp.sum(found**2, -1, keepdims=True) + jnp.sum(codes**2, -1)
        nearest = codes[jnp.argmin(squares - 2 * found @ codes.T, -1)]
        passed = found + jax.lax.stop_gradient(nearest - found)
        decoded = apply(params["decode"], passed, jax.nn.gelu)
        fit = jnp.mean((decoded - batch) ** 2)
        codebook = jnp.mean((jax.lax.stop_gradient(found) - nearest) ** 2)
        commitment = jnp.mean((found - jax.lax.stop_gradient(nearest)) ** 2)
        return fit + codebook + 0.25 * commitment

    params = {
        "encode": network(16, 32, 8),
        "decode": network(8, 32, 16, seed=2),
        "codes": normals(16, 8, seed=9),
    }
    batch = normals(64, 4) @ normals(4, 16, seed=1) / 2
    return Training(loss, params, batch, learning_rate=3e-3, steps=80)


@program("jax")
def plain_physics() -> Training:
    """Burgers' equation by a network, with derivatives of derivatives in its loss."""

    def loss(params: Any, batch: Any) -> Array:
        def u(z: Array) -> Array:
            return apply(params, z, jnp.tanh)[0]

        def residual(z: Array) -> Array:
            (along, over), second = jax.grad(u)(z), jax.hessian(u)(z)[0, 0]
            return over + u(z) * along - 0.1 * second

        inside, start = batch
        fit = jax.vmap(u)(start) + jnp.sin(jnp.pi * start[:, 0])
        return jnp.mean(jax.vmap(residual)(inside) ** 2) + jnp.mean(fit**2)

    start = jnp.stack([jnp.linspace(-1, 1, 32), jnp.zeros(32)], 1)
    inside = jnp.tanh(normals(64, 2)) * jnp.array([1.0, 0.5]) + jnp.array([0.0, 0.5])
    return Training(loss, network(2, 32, 32, 1), (inside, start))


@program("jax")
def plain_meta_learning() -> Training:
    """MAML: the loss after two steps of gradient descent on each of several tasks."""

    def loss(params: Any, batch: Any) -> Array:
        def fit(params: Any, x: Array, y: Array) -> Array:
            return jnp.mean((apply(params, x, jnp.tanh) - y) ** 2)

        def task(x: Array, y: Array, other: Array, wanted: Array) -> Array:
            found = params
            for _ in range(2):
                grads = jax.grad(fit)(found, x, y)
                found = jax.tree.map(lambda p, g: p - 0.1 * g, found, grads)
            return fit(found, other, wanted)

        return jnp.mean(jax.vmap(task)(*batch))

    phases = normals(16, 1, 1)
    x, other = normals(16, 10, 1, seed=1), normals(16, 10, 1, seed=2)
    batch = x, jnp.sin(x + phases), other, jnp.sin(other + phases)
    return Training(loss, network(1, 32, 32, 1), batch)


@program("optax")
def plain_second_order() -> Computation:
    """Logistic regression by optax's L-BFGS with its zoom line search."""
    import optax

    def minimize(x: Array, y: Array) -> Any:
        def loss(w: Array) -> Array:
            scores = x @ w
            return jnp.mean(jax.nn.softplus(scores) - y * scores) + 0.01 * w @ w

        tx, gradient = optax.lbfgs(), optax.value_and_grad_from_state(loss)

        def step(carry: Any, _: None) -> Any:
            w, state = carry
            value, grads = gradient(w, state=state)
            updates, state = tx.update(
                grads, state, w, value=value, grad=grads, value_fn=loss
            )
            return (optax.apply_updates(w, updates), state), value

        start = jnp.zeros(x.shape[1])
        (w, _), values = jax.lax.scan(step, (start, tx.init(start)), None, 8)
        return w, values

    x = normals(128, 8)
    y = (x @ normals(8, seed=1) + normals(128, seed=2) > 0).astype(jnp.float32)
    return Computation(minimize, (x, y))

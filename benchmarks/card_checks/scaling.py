"""Loss scaling on the card: a skipped step, exact scales, no wait for the device."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rivals import LOW

import jamp
from card_checks import Figures, attempt

SCALE = 2.0**10
OVERFLOW_IN_STEP = 2
STEPS = 5


def part(size: str) -> Iterator[Figures]:
    """Three checks, each of which says whether it `holds`, and what it found."""
    del size
    found: Figures = {}
    for check in (an_inf_skips_a_step, scales_are_exact, nothing_waits):
        found[check.__name__] = attempt(check)
        fine = [f"{name}: {f.get('holds', f)}" for name, f in found.items()]
        yield {"summary": "; ".join(fine), **found}


def training() -> tuple[Any, Any, Any, list[Any]]:
    """A donating step, what it starts from, and batches of which one overflows."""
    import teacher

    tx = jamp.dynamic_loss_scaling(optax.adam(1e-3), jamp.GradScaler(init_scale=SCALE))

    @jamp.autocast(device_type="gpu")
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    batches = [teacher.batch(number) for number in range(STEPS)]
    x, y = batches[OVERFLOW_IN_STEP]
    batches[OVERFLOW_IN_STEP] = x.at[0, 0].set(jnp.inf), y
    params = teacher.init(seed=0)
    return step, params, tx.init(params), batches


def same_bits(x: Any, y: Any) -> bool:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def an_inf_skips_a_step() -> Figures:
    """A planted inf: parameters and the optimizer's state stay, the scale halves."""
    step, params, opt_state, batches = training()
    kept, scales, skipped = [], [], []
    for x, y in batches:
        # Copies: what is donated is gone, and on a CPU `device_get` shares its memory.
        before = jax.tree.map(np.array, (params, opt_state.inner_state))
        params, opt_state, _ = step(params, opt_state, x, y)
        kept.append(same_bits(before, (params, opt_state.inner_state)))
        scales.append(float(jamp.loss_scale(opt_state)))
        skipped.append(bool(jamp.last_step_skipped(opt_state)))
    wanted = [number == OVERFLOW_IN_STEP for number in range(STEPS)]
    halved = [SCALE / 2 if n >= OVERFLOW_IN_STEP else SCALE for n in range(STEPS)]
    return {
        "holds": kept == skipped == wanted and scales == halved,
        "unchanged": kept,
        "skipped": skipped,
        "scales": scales,
    }


def scales_are_exact() -> Figures:
    """Gradients scaled by powers of two and unscaled have the same bits.

    Those in float16 are compared among scales that keep them from its subnormals; those
    of a loss that is not scaled are counted beside.
    """
    rng = np.random.default_rng(0)
    x, y, *params = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((64, 16), (64, 4), (16, 32), (32, 4))
    )

    def squared_error(params: list[Any]) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params[0]) @ params[1] - y) ** 2)

    found: Figures = {}
    for dtype in ("float32", *LOW):
        loss_fn = jamp.autocast(
            squared_error,
            device_type="gpu",
            dtype=dtype,
            enabled=dtype != "float32",
        )

        @jax.jit
        def unscaled(params: Any, state: Any, loss_fn: Any = loss_fn) -> Any:
            _, grads = jamp.value_and_grad(loss_fn)(state, params)
            return jamp.GradScaler().unscale(state, grads)[0]

        by_scale = {
            power: unscaled(params, jamp.GradScaler(init_scale=2.0**power).init())
            for power in (0, 8, 12)
        }
        plain = jax.jit(jax.grad(loss_fn))(params)
        found[dtype] = {
            "2^8 and 2^12": differing(by_scale[8], by_scale[12]),
            "1 and 2^12": differing(by_scale[0], by_scale[12]),
            "no scale and 1": differing(plain, by_scale[0]),
        }
    exact = all(counts["2^8 and 2^12"] == 0 for counts in found.values())
    wide = all(found[d]["1 and 2^12"] == 0 for d in ("float32", "bfloat16"))
    return {"holds": exact and wide, "differing": found}


def differing(x: Any, y: Any) -> int:
    """How many numbers of two trees differ."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return int(sum(np.sum(np.asarray(a) != np.asarray(b)) for a, b in pairs))


def nothing_waits() -> Figures:
    """Steps, one of them skipped, run while JAX refuses to move data."""
    step, params, opt_state, batches = training()
    params, opt_state, _ = step(params, opt_state, *batches[0])
    with jax.transfer_guard("disallow"):
        for x, y in batches[1:]:
            params, opt_state, _ = step(params, opt_state, x, y)
    return {"holds": int(opt_state.skipped_steps) == 1}

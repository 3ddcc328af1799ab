"""Functions with derivative rules of their own, under autocast.

One runs under the policy like everything else, backward rule included. The other needs
float32 and says so with `cast_inputs`, as torch's `custom_fwd` does.
"""

import jax
import jax.numpy as jnp

import jamp


@jax.custom_vjp
def project(x: jax.Array, w: jax.Array) -> jax.Array:
    """A matrix product with a straight-through gradient for its input."""
    return jnp.sign(x) @ w


def project_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    return project(x, w), (x, w)


def project_bwd(residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    return g @ w.T, jnp.sign(x).T @ g


project.defvjp(project_fwd, project_bwd)


@jax.custom_vjp
@jamp.custom_fwd(cast_inputs=jnp.float32)
def gram_logdet(x: jax.Array) -> jax.Array:
    """log det(x xᵀ), which 16 bits would ruin."""
    return jnp.linalg.slogdet(x @ x.T)[1]


@jamp.custom_fwd(cast_inputs=jnp.float32)
def gram_logdet_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gram_logdet(x), x


@jamp.custom_bwd(cast_inputs=jnp.float32)
def gram_logdet_bwd(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (2 * g * jnp.linalg.solve(x @ x.T, x),)


gram_logdet.defvjp(gram_logdet_fwd, gram_logdet_bwd)


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(project(x, w) ** 2) + gram_logdet(w)


def main() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (8, 32)) / 4
    x = jax.random.normal(keys[1], (64, 8))
    cast = jamp.autocast(loss_fn, dtype=jnp.float16)
    for record in jamp.explain(loss_fn, dtype=jnp.float16)(w, x).records:
        if record.primitive == "dot_general":
            print(f"{record.location}: {' x '.join(d.name for d in record.operands)}")
    gradients = {"float16": jax.grad(cast)(w, x), "float32": jax.grad(loss_fn)(w, x)}
    error = jnp.abs(gradients["float16"] - gradients["float32"]).max()
    print(f"largest error of the gradient: {error:.1e}")
    return gradients


if __name__ == "__main__":
    main()

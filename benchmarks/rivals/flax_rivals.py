"""The ways to run a Flax model: float32, autocast, by hand, and other libraries."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from rivals import LOW

Function = Callable[..., Any]
MEMORY = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def unchanged(fn: Function) -> Function:
    return fn


@dataclass(frozen=True)
class FlaxRival:
    """One way to run a model.

    Attributes:
      dtype: the `dtype` of the model's modules.
      transform: what is done to the loss, or in inference to the model's application.
      around_model: what is done to the model's application in both.
      around_step: what is done to the training step.
      scaled: whether the loss is scaled, and the scale follows overflows.
      constant_scale: what the loss is multiplied by otherwise, unchecked: gradients in
        16 bits are then the same numbers as with `scaled`, not zeros, which take less
        of a GPU's power and time.
      precision: of float32 matmuls and convolutions; None is JAX's default.
      scheduler: of XLA on CPUs; None is its default, which runs first what it can.
      fused: whether attention is cuDNN's; only of subjects that have attention.
      only_training: whether it is left out in inference, where it is like another.
    """

    dtype: Any = None
    transform: Callable[[Function], Function] = unchanged
    around_model: Callable[[Function], Function] = unchanged
    around_step: Callable[[Function], Function] = unchanged
    scaled: bool = False
    constant_scale: float | None = None
    precision: str | None = None
    scheduler: str | None = None
    fused: bool = False
    only_training: bool = False

    @property
    def compiler_options(self) -> dict[str, str]:
        return {"xla_cpu_scheduler_type": self.scheduler} if self.scheduler else {}

    def tracing(self) -> AbstractContextManager[Any]:
        """The context in which its programs are traced."""
        if self.precision is None:
            return nullcontext()
        return jax.default_matmul_precision(self.precision)


def with_jmp(apply: Function) -> Function:
    """Casts parameters, inputs and outputs with a policy of jmp.

    The other variables stay as they are: a running mean in 16 bits stands still.
    """
    import jmp

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def cast_and_apply(params: Any, state: Any, inputs: Any) -> Any:
        params, inputs = policy.cast_to_compute((params, inputs))
        outputs, state = apply(params, state, inputs)
        return policy.cast_to_output(outputs), state

    return cast_and_apply


def with_jaxamp(fn: Function) -> Function:
    import jaxamp

    return jaxamp.amp(fn, compute_dtype=jnp.bfloat16)


def flax_rivals(platform: str) -> dict[str, FlaxRival]:
    """The rivals on a platform, "cpu" or "gpu", by name, those to compare with first.

    On GPUs there is autocast in both 16-bit dtypes, in float16 with loss scaling, with
    a constant scale and without, in bfloat16 also with cuDNN's attention, and float32
    in both settings of its matmuls; on CPUs autocast with XLA's scheduler that needs
    the least memory, autocast of the whole step, with its gradient, and autocast of the
    model that is written by hand.
    """
    autocast = {dtype: FlaxRival(transform=jamp.autocast(dtype=dtype)) for dtype in LOW}
    by_hand = {"by hand bfloat16": FlaxRival(dtype=jnp.bfloat16)}
    others = {
        "jmp bfloat16": FlaxRival(around_model=with_jmp),
        "jaxamp bfloat16": FlaxRival(transform=with_jaxamp),
    }
    if platform == "gpu":
        return {
            "float32": FlaxRival(),
            "autocast float16": replace(autocast["float16"], scaled=True),
            "autocast bfloat16": autocast["bfloat16"],
            **by_hand,
            "float32 highest": FlaxRival(precision="highest"),
            "autocast bfloat16, cuDNN attention": replace(
                autocast["bfloat16"], fused=True
            ),
            "autocast float16, constant scale": replace(
                autocast["float16"], constant_scale=2.0**16, only_training=True
            ),
            "autocast float16, not scaled": replace(
                autocast["float16"], only_training=True
            ),
            **others,
        }
    return {
        "float32": FlaxRival(),
        "autocast bfloat16": autocast["bfloat16"],
        "memory bfloat16": replace(autocast["bfloat16"], scheduler=MEMORY),
        "step bfloat16": FlaxRival(
            around_step=jamp.autocast(dtype="bfloat16"), only_training=True
        ),
        "both bfloat16": replace(autocast["bfloat16"], dtype=jnp.bfloat16),
        **by_hand,
        **others,
    }

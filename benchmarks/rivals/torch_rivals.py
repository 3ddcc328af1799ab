"""The ways to run a torch model; torch itself is not needed to name them."""

from dataclasses import dataclass

from rivals import LOW


@dataclass(frozen=True)
class TorchRival:
    """One way to run a model: autocast's dtype, if any, and whether it is compiled."""

    dtype: str | None = None
    compiled: bool = False


def torch_rivals(platform: str) -> dict[str, TorchRival]:
    """The rivals on a platform, "cpu" or "gpu", by name.

    On GPUs float16 has loss scaling, and float32 matmuls run in TF32, as JAX's do.
    """
    dtypes = LOW if platform == "gpu" else ("bfloat16",)
    rivals = {"torch float32": TorchRival()}
    rivals |= {f"torch autocast {dtype}": TorchRival(dtype) for dtype in dtypes}
    if platform == "gpu":
        rivals["torch.compile autocast bfloat16"] = TorchRival(
            "bfloat16", compiled=True
        )
    return rivals

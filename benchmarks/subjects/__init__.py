"""The models that the step benchmark measures, each in a file with its sizes.

Every file has `SIZES`, by name ("tiny" for tests, "cpu", "gpu"), and `make(size)`. The
same architectures in PyTorch, of those that are measured by default, are in
`torch_models`.
"""

from functools import cache
from importlib import import_module

from subjects._subject import Subject as Subject

# In the order in which they run: those that compile fast leave time to the others.
SUBJECTS = ("mlp", "simplenet", "lstm", "transformer", "vit", "resnet50")

# Others, for which nothing in jamp was made.
OTHERS = (
    *("llama", "llama_scanned", "moe", "mamba", "gru", "wavenet"),
    *("convnext", "efficientnet", "swin", "unet", "nerf"),
)


@cache
def make_subject(name: str, size: str) -> Subject:
    """A subject in one of its sizes."""
    return import_module(f"subjects.{name}").make(size)

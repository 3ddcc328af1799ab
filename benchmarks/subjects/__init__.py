"""The models that the step benchmark measures, each in a file with its sizes.

Every file has `SIZES`, by name ("tiny" for tests, "cpu", "gpu"), and `make(size)`. The
same architectures in PyTorch, of those that are measured by default, are in
`torch_models`.
"""

import argparse
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


def add_subjects(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose subjects, which become `subject`."""
    which = parser.add_mutually_exclusive_group()
    every = (*SUBJECTS, *OTHERS)
    which.add_argument("--subject", choices=every, nargs="+", default=SUBJECTS)
    which.add_argument(
        "--others",
        dest="subject",
        action="store_const",
        const=OTHERS,
        default=SUBJECTS,
        help=f"the last {len(OTHERS)}",
    )


@cache
def make_subject(name: str, size: str) -> Subject:
    """A subject in one of its sizes."""
    return import_module(f"subjects.{name}").make(size)

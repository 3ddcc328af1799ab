"""Whole models after their papers, small, each with data to learn something from."""

import importlib

from ._task import Task

MODELS = ("resnet", "vit", "gpt2", "mamba", "unet", "tagger")


def make_task(name: str) -> Task:
    """The training task of a model; its library is imported only now."""
    return importlib.import_module(f".{name}", __name__).make_task()

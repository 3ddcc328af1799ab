"""The same decoder with its layers in a scan, each of them checkpointed."""

from subjects import llama
from subjects._subject import Subject

SIZES = llama.SIZES


def make(size: str) -> Subject:
    return llama.make(size, scanned=True)

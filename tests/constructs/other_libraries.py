"""Equinox and Haiku, where they are installed."""

import importlib.util

from ._construct import Construct

CONSTRUCTS: tuple[Construct, ...] = ()

if importlib.util.find_spec("equinox"):
    from . import equinox_layers

    CONSTRUCTS += equinox_layers.CONSTRUCTS
if importlib.util.find_spec("haiku"):
    from . import haiku_layers

    CONSTRUCTS += haiku_layers.CONSTRUCTS

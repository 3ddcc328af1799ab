"""Emission: binds what a plan says, into the trace at hand."""

# Modules that are imported because they register emissions.
from jamp._emit import custom_functions as custom_functions
from jamp._emit import float32_calls as float32_calls
from jamp._emit import programs as programs
from jamp._emit import scans as scans
from jamp._emit.emitter import emit as emit

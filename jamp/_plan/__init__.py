"""Decisions: what happens to each equation of a program, before any of it runs."""

# Imported because they register the rules of equations that hold programs.
from jamp._plan import custom_functions as custom_functions
from jamp._plan import programs as programs

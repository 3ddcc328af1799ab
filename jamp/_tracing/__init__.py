"""From a call to a program: traces, modules of flax, regions, locations."""

"""A pass over a plan: who reads a value decides whether it is rounded.

A rule that rounds says which dtype a value has. A reader that computes in float32 takes
the value as it was computed, before the rounding; an elementwise or reducing equation
that only such readers have computes in float32 itself; and one that reads what is at
hand in float32 computes on that and rounds its own result. What a loop or another
program inside reads rounded, all read rounded. No dtype changes that a user can see.

Equations that now compute in float32 are joined to the float32 calls that they read, or
with which they share an operand: the backward pass computes all again from the 16-bit
values that enter, instead of saving float32, and sums their gradients in float32.

The words of these modules:
- at hand: of a 16-bit value the float32 that it was rounded from is there, too;
- low and wide: readers that need the 16 bits, and those that would take float32;
- apart: of a loop, a branch, a shard or a checkpoint and its backward pass, between
  which JAX keeps values;
- pinned: read in 16 bits by such programs, and so rounded for all readers;
- view: what repeats or scales a value, which the calls that read it do themselves;
- exact: making no rounding of its own, as `max`;
- group: equations that are joined to one float32 call.
"""

from jamp._plan.unrounded.writer import spare_roundings as spare_roundings

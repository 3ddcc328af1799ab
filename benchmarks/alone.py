"""One process at a time compiles a comparison for the GPU and is timed on it.

XLA chooses kernels by timing them, so that compiling has to be alone as well. Others
may trace meanwhile, compile what needs no tuning, or build a rival in PyTorch: a step
or two of theirs is in some round of what is timed, and not in its median.
"""

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

LOCK = Path(tempfile.gettempdir()) / "jamp-benchmarks.lock"


def gpu() -> jax.Device:
    """The GPU that is there; without one the program ends."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this needs an NVIDIA GPU; the device is {device}")
    return device


@contextlib.contextmanager
def alone(deadline: float, poll: float = 0.5) -> Iterator[None]:
    """Waits until no other process is in here, but not beyond a deadline.

    Args:
      deadline: in seconds of time.monotonic.
      poll: seconds from one look to the next; who looks more often goes first.

    Raises:
      TimeoutError: others were in here until the deadline.
    """
    with LOCK.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("other measurements took all the time") from None
                time.sleep(poll)
        yield

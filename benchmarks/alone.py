"""One process at a time compiles for the GPU and is timed on it.

XLA chooses kernels by timing them, so that compiling has to be alone as well.
"""

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / "jamp-benchmarks.lock"


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

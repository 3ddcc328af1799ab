"""How far a diagnosis is, on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Counted = Callable[[int], Callable[[], object]]

# How often the plain line is written anew, in equations.
_EVERY = 50


@contextmanager
def shown(progress: bool | None) -> Iterator[Counted]:
    """Shows a bar, by rich if it is installed, or else a plain line.

    By default it does so if stderr is a terminal.

    Yields:
      A function of the number of equations, which returns what is called after each.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda total: lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _plain
        sys.stderr.write("\n")
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=console.is_terminal) as bar:

        def counted(total: int) -> Callable[[], object]:
            task = bar.add_task("diagnosing", total=total)
            return lambda: bar.advance(task)

        yield counted


def _plain(total: int) -> Callable[[], None]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done % _EVERY == 0 or done == total:
            sys.stderr.write(f"\rdiagnosing: {done} of {total} operations")
            sys.stderr.flush()

    return advance

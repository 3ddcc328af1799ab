"""`jamp.diagnose`: runs a program in float32 and under autocast, side by side."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast import unwrapped
from jamp._compat import api_boundary
from jamp._diagnose import examination
from jamp._diagnose.cure import cure
from jamp._diagnose.diagnosis import Diagnosis
from jamp._diagnose.findings import diagnosis_of
from jamp._diagnose.program import Settings, Subject
from jamp._errors import AutocastError, AutocastTypeError, described
from jamp._tracing.checks import check_function, wrong_argnums

# What it takes beside the options of autocast.
_OWN = ("loss_scale", "argnums", "has_aux", "progress")

# How often the plain line of progress is written anew, in equations.
_EVERY = 50


def diagnose(
    fn: Callable[..., Any],
    *inputs: Never,
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    progress: bool | None = None,
    **autocast_options: Any,
) -> Callable[..., Diagnosis]:
    """Finds the operations whose numbers autocast spoils, and what cures them.

    Runs the program under autocast and in float32 side by side, operation by operation,
    through jit, loops, branches, checkpoints and functions with derivative rules. Where
    results, or gradients, are not what float32 gives, it names the operations in which
    that began, and looks for the smallest change that cures it, by running the program
    again.

        print(jamp.diagnose(loss_fn, loss_scale=2.0**15)(params, batch))

    Branches, lengths of loops and integers are those of the run under autocast in both.

    Args:
      fn: the function, as given to `jamp.autocast`, or what that returned, whose own
        options hold. A step, of which part is under autocast, is diagnosed as it runs
        if no options are given.
      loss_scale: the factor of the loss, 1 for none; with it, `fn` returns a scalar
        loss, and its gradient is diagnosed too.
      argnums: which arguments the gradient is taken of; of `flax.nnx` modules, it is
        taken of all their floating state.
      has_aux: whether `fn` returns a pair of the loss and something else.
      progress: whether to show on stderr how far it is; by default if on a terminal.
      **autocast_options: the options of `jamp.autocast`.

    Returns:
      A function of the same arguments that returns a `Diagnosis`.

    Raises:
      AutocastError: a value of an option or a loss scale that there is not, another
        option than that of a function under autocast, or `argnums` of an argument that
        there is not.
      AutocastTypeError: an unknown option, or one of the wrong type; `fn` is not
        callable; there are no arrays to run it on, or to take the gradient of; or the
        gradient is of what is no scalar loss.
      BannedOpError: the policy bans an operation of the program.
    """
    check_function("diagnose", fn, inputs)
    scale, chosen = _checked(loss_scale, argnums)
    inner = unwrapped("diagnose", fn, autocast_options, _OWN)

    @api_boundary
    def diagnosed(*args: Any, **kwargs: Any) -> Diagnosis:
        subject = Subject.of(inner, args, kwargs, chosen, has_aux)
        shown = partial(_shown, progress)
        run = partial(examination.examine, subject, {}, shown)
        # Values that are not finite are expected here.
        with jax.debug_nans(False), jax.debug_infs(False), np.errstate(all="ignore"):
            first = run(Settings(subject.options(inner), scale))
            return diagnosis_of(subject, first, *cure(subject, first, run))

    return diagnosed


def _checked_scale(loss_scale: float | None) -> float | None:
    if loss_scale is None:
        return None
    try:
        scale = math.fabs(loss_scale)
    except OverflowError as error:
        raise AutocastError("loss_scale is too large for a float") from error
    except TypeError as error:
        raise AutocastTypeError(
            f"loss_scale must be a number, got {described(loss_scale)}; that of an "
            "optimizer's state is jamp.loss_scale(opt_state)"
        ) from error
    limits = jnp.finfo(np.float32)
    if loss_scale < 0 or not float(limits.tiny) <= scale <= float(limits.max):
        raise AutocastError(
            f"loss_scale must be positive and a float32, got {loss_scale}"
        )
    return float(loss_scale)


def _checked(
    loss_scale: float | None, argnums: Any
) -> tuple[float | None, Sequence[int]]:
    """The loss scale, and the arguments of a gradient, of which without it is none."""
    scale = _checked_scale(loss_scale)
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not all(isinstance(number, Integral) for number in numbers):
        raise wrong_argnums(argnums)
    return scale, () if scale is None else numbers


@contextmanager
def _shown(progress: bool | None, total: int) -> Iterator[Callable[[], object]]:
    """Shows a bar, if there is rich, or a line; yields what moves it on."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        numbers = itertools.count(1)

        def tell() -> None:
            done = next(numbers)
            if done % _EVERY == 0 or done == total:
                sys.stderr.write(f"\rdiagnosing: {done} of {total} operations")
                sys.stderr.flush()

        yield tell
        sys.stderr.write("\n")
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task("diagnosing", total=total))

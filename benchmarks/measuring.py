"""Builds the rivals of one subject in one mode, and times them in turn."""

import gc
import math
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
from results_file import first_line
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import flax_rivals
from rivals.torch_rivals import torch_rivals
from subjects import make_subject
from timing import LEAST_SECONDS, threads

BASELINE = "float32"
LEAST_ROUNDS = 3
TORCH_COMPILE_SECONDS = 20.0  # not started with less time left


class BudgetError(Exception):
    """There is no time left."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
      rivals: how the names of the wanted ones begin; empty for all. The baseline always
        takes part.
      rounds: how often each is timed; 0 for the figures that need no timing.
      jobs: how many programs are compiled at once. With several, the seconds that one
        takes mean nothing and are not kept.
      least_seconds: how long each is run for one reading of the clock.
    """

    rivals: tuple[str, ...] = ()
    rounds: int = 0
    jobs: int = 1
    least_seconds: float = LEAST_SECONDS

    def wants(self, rival: str) -> bool:
        """Whether a rival takes part."""
        return rival == BASELINE or not self.rivals or rival.startswith(self.rivals)


class Comparison:
    """One subject in one mode, and all that is known of each rival.

    What a rival raises is its figure, under "error", and the others go on. So it is
    for a rival for which no time is left before `deadline`, in time.monotonic's
    seconds.
    """

    def __init__(
        self, subject: str, size: str, mode: str, plan: Plan, deadline: float = math.inf
    ):
        self.subject, self.size, self.mode = subject, size, mode
        self.deadline = deadline
        self.figures: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.programs: dict[str, Any] = {}
        self._times: dict[str, int] = {}
        self._plan = plan
        self._made = make_subject(subject, size)
        self._say: Callable[[str], None] = lambda _: None

    def prepare(self, say: Callable[[str], None]) -> None:
        """Does what may run beside others' times; `say` is told what is being done."""
        self._say = say
        self.variables = initial_variables(self.subject, self.size)
        self._trace_flax()
        self._build_torch()

    def measure(self, say: Callable[[str], None]) -> None:
        """Compiles and times, after `prepare`; XLA chooses kernels by timing them."""
        self._say = say
        self._compile_flax()
        if self._plan.rounds:
            self._warm_up()
            self._time()

    def close(self) -> None:
        """Gives memory back."""
        self.programs.clear()
        jax.clear_caches()
        gc.collect()
        release_torch()

    def _attempt(self, rival: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a rival may fail in any way
            self.figures.setdefault(rival, {})["error"] = first_line(error)
            self.programs.pop(rival, None)
            self.seconds.pop(rival, None)

    def _check_time(self, rival: str, needed: float = 0.0) -> None:
        if rival != BASELINE and time.monotonic() + needed > self.deadline:
            raise BudgetError("no time was left for it")

    def _trace_flax(self) -> None:
        rivals = flax_rivals(jax.default_backend())

        def trace(rival: str) -> None:
            self._check_time(rival)
            program = FlaxProgram(self._made, rivals[rival], self.mode)
            self.figures[rival] = program.figures
            self.programs[rival] = program

        for rival in filter(self._plan.wants, rivals):
            if rivals[rival].fused and self._made.fused is None:
                continue
            if rivals[rival].only_training and self.mode != "training":
                continue
            self._say(f"tracing {rival}")
            self._attempt(rival, partial(trace, rival))

    def _compile_flax(self) -> None:
        self._say("compiling")

        def compile_in_time(rival: str) -> None:
            self._check_time(rival)
            self.programs[rival].compile()
            if self._plan.jobs > 1:
                del self.figures[rival]["compile_seconds"]

        with ThreadPoolExecutor(self._plan.jobs) as pool:
            for rival, program in list(self.programs.items()):
                if isinstance(program, FlaxProgram):
                    pool.submit(self._attempt, rival, partial(compile_in_time, rival))

    def _build_torch(self) -> None:
        rivals = torch_rivals(jax.default_backend())

        def build(rival: str) -> None:
            # Only here: torch may be absent, and takes seconds to import.
            from rivals.torch_program import TorchProgram

            program = TorchProgram(
                self.subject, self.size, self._made, rivals[rival], self.mode, threads()
            )
            self.figures[rival] = program.figures
            self.programs[rival] = program
            if self._plan.rounds and program.compiles:
                self._check_time(rival, TORCH_COMPILE_SECONDS)
                program.run(1)
            release_torch()

        for rival in filter(self._plan.wants, rivals):
            self._say(f"building {rival}")
            self._attempt(rival, partial(build, rival))

    def _warm_up(self) -> None:
        variables = jax.device_put(self.variables)
        batch = jax.device_put((self._made.inputs, self._made.targets))

        def start(rival: str) -> None:
            program = self.programs[rival]
            if isinstance(program, FlaxProgram):
                program.start(variables, batch)
            program.run(1)
            start = time.perf_counter()
            program.run(1)
            once = time.perf_counter() - start
            self._times[rival] = max(1, math.ceil(self._plan.least_seconds / once))
            self.seconds[rival] = []

        for rival in list(self.programs):
            self._say(f"starting {rival}")
            self._attempt(rival, partial(start, rival))

    def _time(self) -> None:
        def clock(rival: str) -> None:
            times = self._times[rival]
            start = time.perf_counter()
            self.programs[rival].run(times)
            self.seconds[rival].append((time.perf_counter() - start) / times)

        shuffle = random.Random(0)
        for done in range(self._plan.rounds):
            if done >= LEAST_ROUNDS and time.monotonic() > self.deadline:
                break
            self._say(f"round {done + 1} of {self._plan.rounds}")
            # In another order each time, so that none always follows the same one.
            for rival in shuffle.sample(list(self.programs), len(self.programs)):
                self._attempt(rival, partial(clock, rival))


@cache
def initial_variables(subject: str, size: str) -> Any:
    """What a subject begins with, as arrays of NumPy's.

    The processor computes it: for a GPU it takes a minute to compile.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(jax.jit(make_subject(subject, size).init)())


def release_torch() -> None:
    """Lets torch give memory back, if it is there."""
    if "rivals.torch_program" in sys.modules:
        sys.modules["rivals.torch_program"].release()

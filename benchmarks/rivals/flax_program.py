"""The training step or the inference of a Flax model, compiled, with its figures."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import program_figures
from subjects import Subject

import jamp
from rivals.flax_rivals import FlaxRival, Function
from rivals.optimizers import OPTAX


class FlaxProgram:
    """What one rival makes of a subject, in training or inference.

    The constructor traces and lowers, `compile` compiles, `start` takes parameters;
    then `run` runs, and leaves the loss or the outputs in `result`. `figures` holds
    what is known so far.
    """

    def __init__(self, subject: Subject, rival: FlaxRival, mode: str):
        self.subject = subject
        self._rival = rival
        self._training = mode == "training"
        make = subject.fused if rival.fused else subject.model
        self._model = make(rival.dtype, self._training)
        self._tx = OPTAX[subject.optimizer]
        if rival.scaled:
            self._tx = jamp.dynamic_loss_scaling(self._tx)
        self._apply = rival.around_model(self._apply_as_written)
        self._shapes = jax.eval_shape(lambda: self._carry(*subject.init()))
        self.figures: dict[str, Any] = {}
        with rival.tracing():
            self._trace(self._shapes)

    def _trace(self, carried: Any) -> None:
        batch = self.subject.inputs, self.subject.targets
        # The first trace of a process does what later ones find done: it is not timed.
        if self._training:
            params, state, _ = carried
            self.residuals = program_figures.saved_for_backward(
                self._make_loss(), params, state, *batch
            )
            self.figures["residual_bytes"] = program_figures.bytes_saved(self.residuals)
        else:
            self._jitted().trace(carried, *batch)
        jax.clear_caches()
        start = time.perf_counter()
        traced = self._jitted().trace(carried, *batch)
        self._lowered = traced.lower()
        self.figures["lowering_seconds"] = time.perf_counter() - start
        self.figures["casts_in_jaxpr"] = program_figures.casts_in_jaxpr(traced.jaxpr)

    def step_and_arguments(self) -> tuple[Any, ...]:
        """The training step, and shapes of its arguments, to compile elsewhere."""
        return self._step, self._shapes, self.subject.inputs, self.subject.targets

    def compile(self) -> None:
        """Compiles the program."""
        start = time.perf_counter()
        options = self._rival.compiler_options
        self._compiled = self._lowered.compile(compiler_options=options)
        self.figures["compile_seconds"] = time.perf_counter() - start
        memory = self._compiled.memory_analysis()
        self.figures["temporary_bytes"] = memory.temp_size_in_bytes
        self.figures["casts_in_hlo"] = program_figures.casts_in_hlo(self.text())

    def text(self) -> str:
        """The optimized program."""
        return self._compiled.as_text()

    def start(self, variables: tuple[Any, Any], batch: tuple[Any, Any]) -> None:
        """Takes the batch, and copies of the variables, which a step gives away."""
        self._carried = self._carry(*jax.tree.map(jnp.copy, variables))
        self._batch = batch

    def run(self, times: int) -> None:
        """Runs the program a few times, and waits until that is done."""
        for _ in range(times):
            self.result = self._compiled(self._carried, *self._batch)
            if self._training:
                self._carried, self.result = self.result
        jax.block_until_ready((self._carried, self.result))

    def _carry(self, params: Any, state: Any) -> Any:
        if self._training:
            return params, state, self._tx.init(params)
        return params, state

    def _apply_as_written(self, params: Any, state: Any, inputs: Any) -> Any:
        return self._model.apply(
            {"params": params, **state}, inputs, mutable=list(state)
        )

    def _loss_as_written(
        self, params: Any, state: Any, inputs: Any, targets: Any
    ) -> tuple[jax.Array, Any]:
        outputs, state = self._apply(params, state, inputs)
        return self.subject.loss(outputs.astype(jnp.float32), targets), state

    def _make_loss(self) -> Function:
        """The loss, transformed anew: transforms remember what they have traced."""
        return self._rival.transform(self._loss_as_written)

    def _jitted(self) -> Any:
        if self._training:
            return jax.jit(self._rival.around_step(self._step), donate_argnums=0)
        apply = self._rival.transform(self._apply)
        return jax.jit(lambda carried, inputs, targets: apply(*carried, inputs)[0])

    def _step(self, carried: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        params, state, opt_state = carried
        loss = self._make_loss()
        if self._rival.scaled:
            differentiate = jamp.value_and_grad(loss, has_aux=True)
            (value, state), grads = differentiate(
                opt_state, params, state, inputs, targets
            )
        elif scale := self._rival.constant_scale:
            value, pull_back, state = jax.vjp(
                lambda params: loss(params, state, inputs, targets),
                params,
                has_aux=True,
            )
            grads = pull_back(jnp.full_like(value, scale))[0]
            grads = jax.tree.map(lambda grad: grad / scale, grads)
        else:
            differentiate = jax.value_and_grad(loss, has_aux=True)
            (value, state), grads = differentiate(params, state, inputs, targets)
        updates, opt_state = self._tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), value

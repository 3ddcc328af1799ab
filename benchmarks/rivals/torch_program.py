"""The training step or the inference of a torch model, with its figures."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from subjects import Subject

from rivals.optimizers import DECAY, MOMENTUM, RATE
from rivals.torch_rivals import TorchRival

# Of each subject, which all its rivals share: several would fill a card.
_BATCHES: dict[tuple[str, str], Any] = {}


class TorchProgram:
    """What one rival makes of a subject, in training or inference.

    `threads` is the number of processor threads to use; `figures` holds what is known
    so far, and `compiles` whether the first run compiles.
    """

    def __init__(
        self,
        name: str,
        size: str,
        subject: Subject,
        rival: TorchRival,
        mode: str,
        threads: int,
    ):
        module = import_module(f"torch_models.{name}")
        torch.set_num_threads(threads)
        self._device = "cpu"
        if torch.cuda.is_available():
            self._device = "cuda"
            torch.set_float32_matmul_precision("high")
            # XLA times the algorithms of convolutions too.
            torch.backends.cudnn.benchmark = True
        self.compiles = rival.compiled
        self._rival = rival
        self._training = mode == "training"
        self._loss = module.loss
        batch = _BATCHES.get((name, size))
        if batch is None:
            arrays = subject.inputs, subject.targets
            batch = _BATCHES[name, size] = tuple(map(self._tensor, arrays))
        self._inputs, self._targets = batch
        torch.manual_seed(0)
        with torch.device(self._device):
            self._model = module.make(size).train(self._training)
        self._model.to(memory_format=torch.channels_last)
        self._optimizer = _optimizer(subject.optimizer, self._model)
        self._scaler = torch.amp.GradScaler(
            self._device, enabled=rival.dtype == "float16"
        )
        self.figures: dict[str, Any] = {}
        if self._training and not rival.compiled:
            self.figures["residual_bytes"] = self._residual_bytes()
        if rival.compiled:
            self._model = torch.compile(self._model)

    def run(self, times: int) -> None:
        """Runs the program a few times, and waits until that is done."""
        for _ in range(times):
            if self._training:
                self._step()
            else:
                with torch.inference_mode(), self._autocast():
                    self._model(self._inputs)
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler.scale(self._forward()).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _forward(self) -> torch.Tensor:
        with self._autocast():
            return self._loss(self._model(self._inputs), self._targets)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._rival.dtype is None:
            return nullcontext()
        return torch.autocast(self._device, getattr(torch, self._rival.dtype))

    def _residual_bytes(self) -> dict[str, int]:
        """Bytes that autograd keeps for the backward pass, by dtype and in total.

        A buffer is counted once; parameters and the batch are not counted.
        """
        variables = (*self._model.parameters(), *self._model.buffers())
        batch = (t for t in (self._inputs, self._targets) if t is not None)
        known = {_buffer(tensor) for tensor in (*variables, *batch)}
        totals: Counter[str] = Counter()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if _buffer(tensor) not in known:
                known.add(_buffer(tensor))
                dtype = str(tensor.dtype).removeprefix("torch.")
                totals[dtype] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            # While the loss lives, so do the buffers, and none is there twice.
            loss = self._forward()
        del loss
        return {**dict(sorted(totals.items())), "total": totals.total()}

    def _tensor(self, array: Any) -> torch.Tensor | None:
        if array is None:
            return None
        tensor = torch.from_numpy(array)
        if not tensor.is_floating_point():
            return tensor.long().to(self._device)
        if tensor.ndim == 4:
            tensor = tensor.permute(0, 3, 1, 2)
        return tensor.to(self._device)


def release() -> None:
    """Gives the card the memory back that torch keeps for later."""
    torch.cuda.empty_cache()


def _buffer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `optimizers.OPTAX` has under that name."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)

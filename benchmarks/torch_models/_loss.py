"""The loss of the torch models that classify."""

import torch


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of integer labels, over all but the last dimension."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

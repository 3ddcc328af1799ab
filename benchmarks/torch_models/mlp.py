"""The network of PyTorch's recipe for automatic mixed precision."""

from subjects.mlp import SIZES
from torch import nn

loss = nn.functional.mse_loss


def make(size: str) -> nn.Module:
    chosen = SIZES[size]
    layers: list[nn.Module] = []
    for _ in range(chosen.depth - 1):
        layers += [nn.Linear(chosen.width, chosen.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(chosen.width, chosen.width))

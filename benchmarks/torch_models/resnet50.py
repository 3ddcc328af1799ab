"""ResNet-50 with BatchNorm."""

import torch
from subjects.resnet50 import SIZES, Size
from torch import nn

from torch_models._loss import cross_entropy

loss = cross_entropy


def convolution(inputs: int, outputs: int, window: int, stride: int = 1) -> nn.Module:
    """A convolution without bias, and the BatchNorm after it."""
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            convolution(width, 4 * width, 1),
        )
        same = inputs == 4 * width and stride == 1
        self.short = (
            nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.layers(x) + self.short(x))


def make(size: str) -> nn.Module:
    chosen: Size = SIZES[size]
    blocks: list[nn.Module] = []
    inputs = chosen.width
    for stage, count in enumerate(chosen.stages):
        width = chosen.width * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return nn.Sequential(
        convolution(3, chosen.width, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, chosen.classes),
    )

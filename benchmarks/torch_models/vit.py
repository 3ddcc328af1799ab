"""A vision transformer with a class token, of the blocks of the decoder."""

import torch
from subjects.vit import SIZES, Size
from torch import nn

from torch_models._loss import cross_entropy
from torch_models.transformer import Block

loss = cross_entropy


class Vit(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        patches = (size.pixels // size.patch) ** 2
        self.patch = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.place = nn.Parameter(0.02 * torch.randn(patches + 1, size.width))
        self.blocks = nn.Sequential(
            *(Block(size.width, size.heads, causal=False) for _ in range(size.depth))
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


def make(size: str) -> nn.Module:
    return Vit(SIZES[size])

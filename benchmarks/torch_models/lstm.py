"""A language model of stacked LSTM layers."""

import torch
from subjects.lstm import SIZES, Size
from torch import nn

from torch_models._loss import cross_entropy

loss = cross_entropy


class Lstm(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.LSTM(size.width, size.width, size.depth, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


def make(size: str) -> nn.Module:
    return Lstm(SIZES[size])

"""A decoder like GPT-2, with a head tied to the embedding and without dropout."""

import torch
from subjects.transformer import SIZES, Size
from torch import nn

from torch_models._loss import cross_entropy

loss = cross_entropy


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal
        )
        return self.project(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(
            *(Block(size.width, size.heads, causal=True) for _ in range(size.depth))
        )
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight
        x = self.norm(self.blocks(x))
        return nn.functional.linear(x, self.embed.weight)


def make(size: str) -> nn.Module:
    return Transformer(SIZES[size])

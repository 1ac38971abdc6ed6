"""The models and optimizers that trials draw; the data is that of tests.unit.jobs.dataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau

from tests.unit.features import Lion

INPUTS, CLASSES, TOKENS = 6, 2, 11


class OfTokens(nn.Module):
    """A model of tokens, which are made of the inputs that the other models take."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(TOKENS, width), body, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed((x.abs() * 3).long() % TOKENS))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        scores: torch.Tensor = self.head(hidden.mean(1))
        return scores


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(INPUTS, 8, bias=False), nn.Linear(8, INPUTS, bias=False)
        self.outward.weight = nn.Parameter(self.inward.weight.detach().t().clone())
        self.back = nn.Linear(INPUTS, 8, bias=False)
        self.back.weight = self.inward.weight
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.back(self.outward(self.inward(x).tanh())))
        return scores


def mlp(*middle: nn.Module, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, width), *(middle or [nn.ReLU()]), nn.Linear(width, CLASSES))


def model_of(name: str) -> nn.Module:
    match name:
        case "norms":
            return mlp(nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8))
        case "dropout":
            return mlp(nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))
        case "transformer":
            return OfTokens(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), 8)
        case "lstm":
            return OfTokens(nn.LSTM(4, 4, batch_first=True), 4)
        case "embedding":
            return OfTokens(nn.Identity(), 8)
        case "tied":
            return Tied()
        case "many":
            return mlp(*(layer for _ in range(60) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())))
        case "large":
            return mlp(nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600), nn.Dropout(0.1), width=600)
        case "partly_frozen":
            return nn.Sequential(nn.Linear(INPUTS, INPUTS).requires_grad_(False), mlp(nn.BatchNorm1d(8), nn.ReLU()))
        case _:
            return mlp()


def optimizer_of(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    p = [parameter for parameter in parameters if parameter.requires_grad]
    match name:
        case "momentum":
            return torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
        case "adam":
            return torch.optim.Adam(p, 0.01, amsgrad=True)
        case "adamw_fused":
            return torch.optim.AdamW(p, 0.01, fused=True)
        case "adamw_foreach":
            return torch.optim.AdamW(p, 0.01, foreach=True)
        case "rmsprop":
            return torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True)
        case "adagrad":
            return torch.optim.Adagrad(p, 0.05)
        case "radam":
            return torch.optim.RAdam(p, 0.01)
        case "adafactor":
            return torch.optim.Adafactor(p, 0.01)
        case "lion":
            return Lion(p, 0.003)
        case _:
            return torch.optim.SGD(p, 0.05)


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    match name:
        case "cosine":
            return CosineAnnealingLR(optimizer, 40)
        case "plateau":
            return ReduceLROnPlateau(optimizer, patience=1, threshold=0.1)
        case "warmup":
            return LinearLR(optimizer, 0.1, total_iters=20)
    return None

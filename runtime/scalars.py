"""Numbers which users log, whatever they are made of."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from elastic.errors import UsageError

Number: TypeAlias = "torch.Tensor | float"


def same_nan(value: float) -> float:
    """The value; of the many NaNs always the same one. Which one a sum of NaNs and infinities gives, with which sign,
    depends on what has travelled as text, and on the processor."""
    return math.nan if math.isnan(value) else value


def as_number(value: object, what: str) -> float:
    """The float64 of a number or of a real tensor of one element. Raises UsageError naming `what`."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach().item())
    try:
        if isinstance(value, (str, bytes, torch.Tensor)):
            raise TypeError(type(value))
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise UsageError(f"{what} is a {type(value).__name__}{shape}, but must be one real number") from error

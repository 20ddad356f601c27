"""The kept answers of transformers, as `python -m tests.make_references` wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass
class Reference:
    """What transformers says. Arrays are described in `tests.make_references`."""

    name: str
    prompts: list[list[int]]
    chosen: np.ndarray
    best_ids: np.ndarray
    best_logits: np.ndarray
    chosen_logits: np.ndarray
    long_ids: list[int]
    long_sampled: Tensor
    long_best_ids: Tensor
    long_best_logits: Tensor


def read_reference(name: str) -> Reference:
    with np.load(Path(__file__).parent.parent / "data" / f"reference_{name}.npz", allow_pickle=False) as kept:
        ends = np.cumsum(kept["prompt_lengths"])
        return Reference(
            name=name,
            prompts=[part.tolist() for part in np.split(kept["prompts"], ends[:-1])],
            chosen=kept["chosen"],
            best_ids=kept["best_ids"],
            best_logits=kept["best_logits"],
            chosen_logits=kept["chosen_logits"],
            long_ids=kept["long_ids"].tolist(),
            long_sampled=torch.from_numpy(kept["long_sampled"]),
            long_best_ids=torch.from_numpy(kept["long_best_ids"]).long(),
            long_best_logits=torch.from_numpy(kept["long_best_logits"]),
        )

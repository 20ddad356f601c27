"""Native sampling: a thin layer over C. What it computes is defined in `ksana.sampling`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ksana.kernels.library import Library

NAN_LOGIT, INFINITE_LOGIT, NOTHING_LEFT = -1, -2, -3
"""What a row gets in place of a token."""

_ROW = struct.Struct("=QIIffdqqq")

RowParameters = tuple[int, int, int, float, float, float, int, Sequence[int]]
"""seed, choice index, output position, temperature (0: greedy), min_p, top_p, top_k, suppressed ids."""


def sample_rows(library: Library, logits: Tensor, rows: Sequence[RowParameters]) -> list[int]:
    """A token id, or one of the negative numbers above, for each row of dense float32 logits [R, V]."""
    suppressed: list[int] = []
    packed = bytearray(_ROW.size * len(rows))
    for index, (*numbers, banned) in enumerate(rows):
        start = len(suppressed)
        suppressed.extend(banned)
        _ROW.pack_into(packed, index * _ROW.size, *numbers, start, len(suppressed))
    table = torch.frombuffer(packed, dtype=torch.uint8)
    ids = torch.tensor(suppressed, dtype=torch.int64)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    num_rows, vocabulary = logits.shape
    if library.sample(
        *(logits.data_ptr(), table.data_ptr(), ids.data_ptr(), tokens.data_ptr()),
        *(num_rows, vocabulary, vocabulary),
    ):
        raise library.error()
    return tokens.tolist()


def gumbels(library: Library, seed: int, choice_index: int, output_position: int, num_tokens: int) -> Tensor:
    """The noise of token ids 0..num_tokens-1, for tests that compare it with its definition."""
    out = torch.empty(num_tokens, dtype=torch.float32)
    library.gumbels(seed, choice_index, output_position, out.data_ptr(), num_tokens)
    return out

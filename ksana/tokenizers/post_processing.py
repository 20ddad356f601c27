"""What a tokenizer adds around a text: a BOS before it, an EOS after it."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import processors


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let `backend` add these tokens, which it must know, and nothing else. None adds nothing."""
    around = [token for token in (bos, eos) if token is not None]
    single = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    )

"""Where a model's tokenizer is, whatever form the model has."""

from __future__ import annotations

from pathlib import Path

from ksana.errors import ModelLoadError
from ksana.tokenizers.gguf import load_gguf_tokenizer
from ksana.tokenizers.huggingface import load_huggingface_tokenizer
from ksana.tokenizers.tokenizer import Tokenizer


def load_tokenizer(
    path: Path, chat_template: str | None = None, num_embeddings: int | None = None
) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file. No torch, no transformers.

    `chat_template` is a template to use instead of the model's own. `num_embeddings`: of the model, so that a
    vocabulary that cannot be its own is refused before anything is made of it.
    Raises ModelLoadError when there is none, or one that would not give the ids the model was trained on.
    """
    if path.is_dir():
        return load_huggingface_tokenizer(path, chat_template, num_embeddings)
    if path.suffix == ".gguf":
        return load_gguf_tokenizer(path, chat_template)
    raise ModelLoadError(f"{path}: neither a directory nor a .gguf file, so it has no tokenizer")

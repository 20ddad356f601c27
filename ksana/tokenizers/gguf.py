"""The tokenizer out of a GGUF file: vocabulary, merges, special tokens and chat template from its metadata.

Two kinds (`tokenizer.ggml.model`): "gpt2" is byte-level BPE, whose words `tokenizer.ggml.pre` names; "llama"
is SentencePiece BPE with a score per token and single bytes for what the vocabulary lacks. Where a file
names its pre-tokenizer, the ids are those of the model's own tokenizer.json.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import UnionType
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.models.gguf_file import GgufFile
from ksana.shown import shown
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.pieces import pieces_of
from ksana.tokenizers.post_processing import set_bos_eos
from ksana.tokenizers.sentencepiece_merges import EqualScores, derive_merges
from ksana.tokenizers.split_patterns import byte_level_style
from ksana.tokenizers.tokenizer import SpecialTokens, Tokenizer
from ksana.tokenizers.vocabulary_limits import check_added_tokens, check_tokens

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""`tokenizer.ggml.token_type`."""

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SENTENCEPIECE_IDS = {
    "unknown_token_id": (0, _UNKNOWN),
    "bos_token_id": (1, _CONTROL),
    "eos_token_id": (2, _CONTROL),
}
"""Where SentencePiece files that do not say have these tokens, and of which type they are."""
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Control tokens that end an answer where the chat template uses them: files often name only the end of the
document as their eos."""
_MAX_CUTTING = 200 << 20
"""Characters to look at while merges are derived (1 s): the squares of the tokens' lengths, 11 million for
Gemma 3's."""
_SPACE = "\u2581"


class _Metadata:
    """The `tokenizer.ggml.*` values of a file, checked as they are read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.source = str(file.path)
        self.tokens: list[str] = self._list("tokens", str)
        check_tokens(self.tokens, self.source)
        self.types: list[int] = self._list("token_type", int, self.tokens, default=1)
        check_added_tokens(self.ids_of_type(_CONTROL, _USER_DEFINED), self.source)

    def _list(
        self, name: str, kind: type | UnionType, alongside: list[Any] | None = None, default: Any = None
    ) -> list[Any]:
        values = self.value(name)
        if values is None and default is not None and alongside is not None:
            return [default] * len(alongside)
        if not isinstance(values, list) or not values:
            raise ModelLoadError(f"{self.source}: there is no list tokenizer.ggml.{name}")
        if alongside is not None and len(values) != len(alongside):
            raise ModelLoadError(
                f"{self.source}: tokenizer.ggml.{name} has {len(values)} items for {len(alongside)} tokens"
            )
        for index, value in enumerate(values):
            if not isinstance(value, kind):
                raise ModelLoadError(
                    f"{self.source}: item {index} of tokenizer.ggml.{name} is a {type(value).__name__}"
                )
        return values

    def value(self, name: str, default: Any = None) -> Any:
        return self.file.get(f"tokenizer.ggml.{name}", default)

    def scores(self) -> list[float]:
        scores = self._list("scores", int | float, self.tokens)
        if not all(map(math.isfinite, scores)):
            raise ModelLoadError(f"{self.source}: tokenizer.ggml.scores has an item that is not finite")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self._list("merges", str)]
        if not all(left and right and " " not in right for left, _, right in pairs):
            raise ModelLoadError(f"{self.source}: tokenizer.ggml.merges has an item that is not a pair")
        return [(left, right) for left, _, right in pairs]

    def token_id(self, name: str) -> int | None:
        token_id = self.value(name)
        if token_id is None:
            return self._usual_id(name)
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise ModelLoadError(
                f"{self.source}: tokenizer.ggml.{name} is {shown(token_id)}, not one of "
                f"{len(self.tokens)} tokens"
            )
        return token_id

    def _usual_id(self, name: str) -> int | None:
        """The id of a token in a role where the file does not name it."""
        if self.value("model") != "llama" or name not in _SENTENCEPIECE_IDS:
            return None
        token_id, kind = _SENTENCEPIECE_IDS[name]
        return token_id if self.types[token_id : token_id + 1] == [kind] else None

    def ids_of_type(self, *kinds: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]


def load_gguf_tokenizer(path: Path, chat_template: str | None = None) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes. `chat_template` replaces the file's own.

    Takes 0.2 s for 49,152 tokens of byte-level BPE, 2 s for 262,144 of SentencePiece, whose merges have to
    be found. Raises ModelLoadError for metadata that is missing, contradictory or of an unknown kind.
    """
    file = GgufFile(path)
    metadata = _Metadata(file)
    kind = metadata.value("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata), True
    else:
        raise ModelLoadError(
            f"{path}: the tokenizer kind {kind!r} (tokenizer.ggml.model) is not gpt2 or llama"
        )
    named = {
        role: metadata.tokens[token_id]
        for role, key in _NAMED.items()
        if (token_id := metadata.token_id(key)) is not None
    }
    set_bos_eos(
        backend,
        bos=named.get("bos_token") if metadata.value("add_bos_token", adds_bos) else None,
        eos=named.get("eos_token") if metadata.value("add_eos_token", False) else None,
    )
    template = chat_template if chat_template is not None else file.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        pieces_of(backend, str(path)),
        SpecialTokens(named, metadata.token_id("bos_token_id"), _eos_ids(metadata, template)),
        ChatTemplate(template, named, str(path)) if isinstance(template, str) else None,
        str(path),
    )


def _byte_level(metadata: _Metadata) -> tuple[Backend, bool]:
    style = byte_level_style(metadata.value("pre", "default"), metadata.source)
    vocabulary = {token: token_id for token_id, token in enumerate(metadata.tokens)}
    backend = _backend(
        metadata, vocabulary, metadata.merges(), fuse_unk=False, ignore_merges=style.ignore_merges
    )
    normalizer = style.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = style.splitter()
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, metadata, metadata.tokens)
    return backend, style.adds_bos


def _sentencepiece(metadata: _Metadata) -> Backend:
    gemma = str(metadata.file.get("general.architecture", "")).startswith("gemma")
    if (work := sum(len(token) ** 2 for token in metadata.tokens)) > _MAX_CUTTING:
        raise ModelLoadError(
            f"{metadata.source}: the tokens are too long to find their merges (the squares of their lengths"
            f" add up to {work}, more than {_MAX_CUTTING}; the longest has {max(map(len, metadata.tokens))})"
        )
    tokens, ranks = metadata.tokens, [-score for score in metadata.scores()]
    if gemma:
        # The makers of these files write runs of spaces as spaces, and put -1000 in place of the score of
        # every token added by hand; the vocabulary has "▁" and 0 there, and joins them before all others.
        tokens = [
            _SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens
        ]
        for token_id in metadata.ids_of_type(_USER_DEFINED):
            ranks[token_id] = 0.0
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = derive_merges(
        ranks,
        vocabulary,
        whole=metadata.ids_of_type(_UNKNOWN, _CONTROL, _BYTE),
        equal_scores=EqualScores.LONGEST_FIRST if gemma else EqualScores.BY_IDS,
    )
    unknown_id = metadata.token_id("unknown_token_id")
    backend = _backend(
        metadata,
        vocabulary,
        merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown_id is None else tokens[unknown_id],
    )
    prefix = bool(metadata.value("add_space_prefix", not gemma))
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spell = normalizers.Replace(" ", _SPACE)
    # A normalizer sees each stretch of text between whole tokens on its own, so that every one gets its "▁",
    # also before a space that is there already.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spell]) if prefix else spell
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if prefix else text)
    _add_whole_tokens(backend, metadata, tokens)
    return backend


def _backend(
    metadata: _Metadata, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Backend:
    if len(vocabulary) != len(metadata.tokens):
        raise ModelLoadError(f"{metadata.source}: tokenizer.ggml.tokens has a token twice")
    try:
        return Backend(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{metadata.source}: the tokenizer cannot be built: {error}") from error


def _add_whole_tokens(backend: Backend, metadata: _Metadata, tokens: list[str]) -> None:
    """Tokens that are found whole in a text: control tokens (special) and those the model's makers added.

    `tokens` are the vocabulary's, as the backend knows them.
    """
    named = (metadata.token_id(key) for key in _NAMED.values())
    control = {*metadata.ids_of_type(_CONTROL), *(token_id for token_id in named if token_id is not None)}
    backend.add_special_tokens(
        [AddedToken(tokens[token_id], normalized=False, special=True) for token_id in sorted(control)]
    )
    added = metadata.ids_of_type(_USER_DEFINED)
    backend.add_tokens([AddedToken(tokens[token_id], normalized=False, special=False) for token_id in added])


def _eos_ids(metadata: _Metadata, template: Any) -> tuple[int, ...]:
    ids = [metadata.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    if isinstance(template, str):
        control = {metadata.tokens[i]: i for i in metadata.ids_of_type(_CONTROL)}
        ids += [control.get(token) for token in _ENDS_OF_TURN if token in template]
    return tuple(dict.fromkeys(i for i in ids if i is not None))

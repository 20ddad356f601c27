"""A loaded tokenizer: text to ids, ids to text, conversations to ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.detokenizer import Detokenizer
from ksana.tokenizers.guarded_encoding import GuardedEncoding
from ksana.tokenizers.pieces import TokenPieces
from ksana.tokenizers.vocabulary_limits import MAX_TOKEN_CHARS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens with a role. `named` maps "bos_token", "eos_token", ... to their spelling, for templates."""

    named: Mapping[str, str] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Any of these ends an answer."""


class Tokenizer:
    """Text and ids of one model. Immutable after loading; may be used from several threads.

    Special tokens written out in a text ("<|im_end|>") are read as the special tokens, in prompts and in the
    content of chat messages alike. That is what the reference tokenizers do by default.
    """

    def __init__(
        self,
        backend: Backend,
        pieces: TokenPieces,
        special: SpecialTokens,
        chat_template: ChatTemplate | None,
        source: str,
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._chat_template = chat_template
        self.source = source
        """The file it was loaded from, for texts that people read."""
        self.bos_id = special.bos_id
        self.eos_ids = special.eos_ids
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the largest id."""
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.longest_token_chars = max(map(len, vocabulary))
        """No token stands for more characters than this."""
        if self.longest_token_chars > MAX_TOKEN_CHARS:
            raise ModelLoadError(
                f"{source}: a token has {self.longest_token_chars} characters; {MAX_TOKEN_CHARS} are allowed"
            )
        if getattr(backend.model, "dropout", None):
            log.warning("%s: the dropout of its merges is for training and is left out", source)
            backend.model.dropout = None
        self.encoding = GuardedEncoding(backend, source)

    def close(self) -> None:
        """End the process that encodes what could explode, if one was needed."""
        self.encoding.close()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. `add_special_tokens` adds what the model expects around one (a BOS, often).

        About 1 µs per character; releases the GIL. Raises RequestError for text that is not Unicode, that the
        tokenizer fails on, or that takes more time or memory than one text may take.
        """
        return self.encoding.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids (see `ksana.tokenizers.detokenizer` for its definition)."""
        detokenizer = self.stream(skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def spelling(self, token_id: int) -> str:
        """A special token as it is written out."""
        return self._pieces[token_id].decode(errors="replace")

    def stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the ids that follow `prompt_ids`."""
        hidden_ids = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._pieces, hidden_ids, prompt_ids)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        date: str | None = None,
    ) -> str:
        """A conversation as the model's chat template writes it.

        Raises RequestError if the model has no template or the template refuses the conversation.
        """
        if self._chat_template is None:
            raise RequestError(
                f"this model has no chat template ({self.source}): it is probably a base model; "
                "use completions, or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return self._chat_template.render(messages, add_generation_prompt, continue_final_message, date)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        date: str | None = None,
    ) -> list[int]:
        """Ids of a conversation. The template writes every special token itself, so no BOS is added."""
        text = self.render_chat(messages, add_generation_prompt, continue_final_message, date)
        return self.encode(text, add_special_tokens=False)

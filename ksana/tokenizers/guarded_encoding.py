"""Encoding that cannot take the server with it.

Where every step of a tokenizer is known to be linear, texts of usual length are encoded here, in this
process: that is what nearly all models have, and costs no hop. Everything else is encoded by a process of its
own with limits on memory and processor time (`ksana.tokenizers.encoder_process`): a tokenizer with an unknown
step, and very long texts, whose ids alone take a gigabyte. A text that exceeds the limits is refused, the
process is replaced, and the server has lost nothing.

Why not otherwise: refusing at load what could explode would turn away honest models whose pattern is only
new; a process for every tokenizer would make each short prompt wait for a hop, and hold each vocabulary
twice; and in this process there are no limits, since nothing stops a thread that is inside the library.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError, RequestError
from ksana.runtime.boundary import described, harms_only_its_request
from ksana.tokenizers.encoder_child import ChildEnded, EncoderChild, TextLimits
from ksana.tokenizers.encoding_bounds import bounds_of, bounds_of_file, pipeline_of

log = logging.getLogger(__name__)

NOT_TOKENIZED = "prompt_not_tokenized"
MAX_CHARS_IN_PROCESS = 1 << 20
"""Of a normalized text: about 250 MB and one second."""


class GuardedEncoding:
    """Text to ids for one backend. May be used from several threads."""

    def __init__(self, backend: Backend, source: str, limits: TextLimits | None = None) -> None:
        self._backend = backend
        self._limits = limits or TextLimits()
        bounds = bounds_of(pipeline_of(backend))
        self._max_chars_here = 0 if bounds.reason is not None else MAX_CHARS_IN_PROCESS // bounds.growth
        self.guarded_because = bounds.reason
        """Why every text goes to the other process; None where only very long ones do."""
        self._child = EncoderChild(lambda: backend.to_str().encode(), self._limits)
        if bounds.reason is not None:
            log.warning(
                "%s: prompts are encoded in a process with limits, since %s (at most %s each)",
                source,
                bounds.reason,
                self._limits,
            )

    def is_elsewhere(self, num_chars: int) -> bool:
        """Whether a text of that length is encoded by the other process, which may take seconds."""
        return num_chars > self._max_chars_here or self.guarded_because is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Raises RequestError for text that cannot be encoded, or not within the limits."""
        try:
            if self.is_elsewhere(len(text)):
                text.encode()
                return self._child.encode(text, add_special_tokens)
            # Of the package's calls, the one on a batch is the one that releases the GIL.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "the text contains a lone surrogate, which is not valid Unicode", param="prompt"
            ) from None
        except ChildEnded as ended:
            raise _refused(ended.why) from None
        except BaseException as error:
            if not harms_only_its_request(error):
                raise
            raise _refused(f"this model's tokenizer failed on it ({described(error)})") from None

    def close(self) -> None:
        """End the other process, if there is one. It would start again with the next text that needs it."""
        self._child.close()


def _refused(why: str) -> RequestError:
    message = f"The text could not be turned into tokens: {why}."
    return RequestError(message, param="prompt", code=NOT_TOKENIZED)


def load_backend(definition: bytes, source: str) -> Backend:
    """A tokenizer.json as the package understands it. `source` names the file in errors.

    What is not known to be harmless is loaded by a process with limits first: loading it again takes no more.
    Raises ModelLoadError.
    """
    try:
        if bounds_of_file(definition).reason is not None:
            EncoderChild(lambda: definition, TextLimits()).check()
        return Backend.from_buffer(definition)
    except ChildEnded as ended:
        raise ModelLoadError(f"{source}: the tokenizer cannot be read: {ended.why}") from None
    except BaseException as error:  # the package raises bare Exception, and panics
        if not harms_only_its_request(error):
            raise
        raise ModelLoadError(f"{source}: the tokenizer cannot be read: {str(error)[:500]}") from None


def check_added(backend: Backend, later: Any, source: str) -> None:
    """Refuse tokens of a tokenizer_config.json that would be normalized by steps that may explode.

    Adding a token normalizes it, in this process. Those that tokenizer.json has, `load_backend` has seen.
    Raises ModelLoadError.
    """
    if bounds_of(pipeline_of(backend)).reason is None or not isinstance(later, Mapping):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in later.values():
        if isinstance(token, Mapping) and token.get("normalized") and token.get("content") not in known:
            raise ModelLoadError(
                f"{source}: tokenizer_config.json adds a token that tokenizer.json lacks and that goes"
                " through normalizers not known to be bounded: add it to tokenizer.json"
            )

"""The text of one choice of one request, as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.messages.requests import SamplingParams
from ksana.tokenizers.stop_matcher import StopMatcher
from ksana.tokenizers.tokenizer import Tokenizer


class OutputText:
    """Detokenizing and stop strings together.

    Which tokens show no text: special ones, if `skip_special_tokens`; the model's end-of-sequence tokens, if
    they end the request and `skip_special_tokens`; `stop_token_ids`, unless `include_stop_str_in_output`.
    Stop strings are found all the same where special tokens of no text are part of them (see `StopMatcher`);
    with `include_stop_str_in_output` such a string is shown as it was asked for.
    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.num_tokens = 0
        """Output tokens accounted for; none are taken after a stop string."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.stream(sampling.skip_special_tokens, prompt_ids)
        self._skips_special = sampling.skip_special_tokens
        stops = sampling.stop
        self._matcher = StopMatcher(stops, sampling.include_stop_str_in_output) if stops else None
        self._min_tokens = sampling.min_tokens
        self._silent: frozenset[int] = frozenset()
        if not sampling.include_stop_str_in_output:
            self._silent |= frozenset(sampling.stop_token_ids)
        if sampling.skip_special_tokens and not sampling.ignore_eos:
            self._silent |= frozenset(tokenizer.eos_ids)

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; token `num_tokens - 1` completed it."""
        return None if self._matcher is None else self._matcher.found

    def push(self, token_id: int) -> str:
        """Account for the next token; return the text that became certain. Not after a stop string."""
        self.num_tokens += 1
        is_silent = token_id in self._silent
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return "" if is_silent else self._detokenizer.push(token_id)
        is_special = token_id in self._tokenizer.special_ids or token_id in self._tokenizer.eos_ids
        if is_special and (is_silent or self._skips_special):
            return self._matcher.push_hidden(self._tokenizer.spelling(token_id))
        return "" if is_silent else self._matcher.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The tokens are over: return what was held back. It may itself complete a stop string."""
        if self._matcher is None:
            return self._detokenizer.flush()
        text = self._matcher.push(self._detokenizer.flush())
        return text + self._matcher.flush()

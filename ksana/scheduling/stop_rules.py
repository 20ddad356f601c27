"""When an output token ends its request. Stop strings are the tokenizer's: it alone knows the text."""

from __future__ import annotations

import msgspec

from ksana.messages.outputs import Finished
from ksana.messages.requests import SamplingParams


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one request, made ready for a check per token."""

    eos_token_ids: frozenset[int]
    """The model's own ends; empty with `ignore_eos`."""
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    """Output tokens at most: the request's max_tokens, or fewer where the context ends before."""

    @classmethod
    def of(
        cls, sampling: SamplingParams, eos_token_ids: tuple[int, ...], prompt_len: int, max_model_len: int
    ) -> StopRules:
        room = max_model_len - prompt_len
        return cls(
            eos_token_ids=frozenset() if sampling.ignore_eos else frozenset(eos_token_ids),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        )

    def ending(self, token_id: int, num_output_tokens: int) -> Finished | None:
        """How the request ends with `token_id` as its `num_output_tokens`-th output token, if it does.

        The ending token counts as output. An end and the limit at once is a stop, not a length.
        """
        if num_output_tokens >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return Finished(reason="stop")
            if token_id in self.stop_token_ids:
                return Finished(reason="stop", stop_reason=token_id)
        if num_output_tokens >= self.max_tokens:
            return Finished(reason="length")
        return None


def suppressed_token_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that the sampler must not choose before output position `min_tokens`: those that would end the
    request. In order, without doubles; empty when there is no minimum."""
    if not sampling.min_tokens:
        return ()
    ending = sampling.stop_token_ids if sampling.ignore_eos else eos_token_ids + sampling.stop_token_ids
    return tuple(dict.fromkeys(ending))

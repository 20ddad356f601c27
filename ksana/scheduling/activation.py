"""What one activation of the scheduler says, gathered until its end."""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, RequestId, StepId
from ksana.messages.outputs import RequestEnded, RequestTokens, StepOutputs
from ksana.messages.steps import StepPlan

Said = tuple[Literal["executor", "block_allocator", "tokenizer", "remote_cache_loader"], Message]


class Activation:
    """The time and the messages out. Tokens of one request are joined, so producers hear once."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.said: list[Said] = []
        """In order; the outputs come last."""
        self._tokens: dict[RequestId, tuple[int, list[int]]] = {}
        self._ended: list[RequestEnded] = []

    def recall_steps(self) -> list[StepId]:
        """Take back the step plans that were to be sent: there is nobody left to run them."""
        recalled = [message.step_id for _, message in self.said if isinstance(message, StepPlan)]
        self.said = [said for said in self.said if not isinstance(said[1], StepPlan)]
        return recalled

    def token(self, request_id: RequestId, index: int, token_id: int) -> None:
        """Output token `index` of the request; indices of one request come in order."""
        entry = self._tokens.get(request_id)
        if entry is None:
            self._tokens[request_id] = (index, [token_id])
        else:
            entry[1].append(token_id)

    def truncate(self, request_id: RequestId, num_output_tokens: int) -> None:
        """Do not send output tokens from this index on (those sent before are the tokenizer's to ignore)."""
        entry = self._tokens.get(request_id)
        if entry is None:
            return
        first_index, token_ids = entry
        del token_ids[max(0, num_output_tokens - first_index) :]
        if not token_ids:
            del self._tokens[request_id]

    def ended(self, ended: RequestEnded) -> None:
        self._ended.append(ended)

    def outputs(self, step_id: StepId) -> StepOutputs | None:
        if not self._tokens and not self._ended:
            return None
        tokens = tuple(
            [
                RequestTokens(request_id=request_id, first_index=first_index, token_ids=tuple(token_ids))
                for request_id, (first_index, token_ids) in self._tokens.items()
            ]
        )
        return StepOutputs(step_id=step_id, tokens=tokens, ended=tuple(self._ended))

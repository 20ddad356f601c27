from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.encoding import EncodePrompt, PromptEncoded
from ksana.messages.outputs import (
    Aborted,
    Ended,
    Failed,
    Finished,
    Outcome,
    PromptAccepted,
    RequestEnded,
    RequestTokens,
    StepOutputs,
    TextDelta,
    Usage,
)
from ksana.messages.requests import (
    Abort,
    AddRequest,
    ChatMessage,
    ChatPrompt,
    Generate,
    Prompt,
    SamplingParams,
    StopStringFound,
    TextPrompt,
    TokensPrompt,
)
from ksana.tokenizers.core import MAX_CHARS_AT_ONCE, TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder
from tests.tokenizers.test_stop_matcher import ended_text
from tests.tokenizers.tiny_tokenizers import SPECIAL, byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = 1
LENGTH, STOP = Finished(reason="length"), Finished(reason="stop")


def ids(text: str) -> tuple[int, ...]:
    """One token per byte, so that tokens and characters can be counted."""
    return tuple(3 + list(TOKENIZER_BYTES).index(byte) for byte in text.encode())


TOKENIZER_BYTES = bytes(TOKENIZER._pieces[i][0] for i in range(3, 259))


def ids_with_special(text: str) -> list[int]:
    """The same with the special tokens that are written out."""
    token_ids: list[int] = []
    while text:
        special = next((one for one in SPECIAL if text.startswith(one)), None)
        token_ids += ids(text[0]) if special is None else [SPECIAL.index(special)]
        text = text[len(special or text[0]) :]
    return token_ids


class Harness:
    """A core with its producer and scheduler ends."""

    def __init__(self, max_model_len: int = 1000) -> None:
        self.encoder = PromptEncoder(TOKENIZER, max_model_len=max_model_len, vocab_size=TOKENIZER.vocab_size)
        self.core = TokenizerCore(self.encoder)
        self.heard: dict[str, list[Message]] = {"producer": [], "scheduler": [], "tokenizer": []}
        self.step_id = 0

    def tell(self, *messages: Message) -> None:
        for address, message in self.core.handle(0.0, messages):
            self.heard[address].append(message)

    def generate(self, prompt: Prompt | None = None, request_id: int = 1, **sampling: Any) -> None:
        params = SamplingParams(**{"seed": 1, **sampling})
        prompt = prompt or TextPrompt(text="Hi")
        self.tell(
            Generate(
                request_id=request_id, prompt=prompt, sampling=params, arrival_time_s=1.5, deadline_s=9.0
            )
        )

    def outputs(
        self, *steps: Sequence[int], first: int = 0, outcome: Outcome | None = None, request_id: int = 1
    ) -> StepOutputs:
        tokens, index = [], first
        for step in steps:
            tokens.append(RequestTokens(request_id=request_id, first_index=index, token_ids=tuple(step)))
            index += len(step)
        usage = Usage(num_prompt_tokens=3, num_output_tokens=index)
        ended = (RequestEnded(request_id=request_id, outcome=outcome, usage=usage),) if outcome else ()
        self.step_id += 1
        return StepOutputs(step_id=self.step_id, tokens=tuple(tokens), ended=ended)

    @property
    def text(self) -> str:
        return "".join(m.text for m in self.heard["producer"] if isinstance(m, TextDelta))

    @property
    def shown_ids(self) -> tuple[int, ...]:
        return tuple(i for m in self.heard["producer"] if isinstance(m, TextDelta) for i in m.token_ids)

    @property
    def ended(self) -> Ended:
        (ended,) = (m for m in self.heard["producer"] if isinstance(m, Ended))
        assert self.heard["producer"][-1] is ended
        return ended

    @property
    def failed(self) -> Failed:
        assert isinstance(self.ended.outcome, Failed)
        assert self.heard["scheduler"] == []
        return self.ended.outcome


@pytest.fixture
def harness() -> Harness:
    return Harness()


class TestTheWayIn:
    def test_a_prompt_becomes_a_request_with_every_limit_resolved(self, harness: Harness) -> None:
        harness.generate(temperature=0.0)
        (accepted,), (add,) = harness.heard["producer"], harness.heard["scheduler"]
        prompt_ids = tuple(TOKENIZER.encode("Hi"))
        assert accepted == PromptAccepted(
            request_id=1, prompt_token_ids=prompt_ids, max_tokens=1000 - len(prompt_ids)
        )
        assert isinstance(add, AddRequest)
        assert (add.prompt_token_ids, add.sampling.max_tokens) == (prompt_ids, accepted.max_tokens)
        assert (add.eos_token_ids, add.arrival_time_s, add.deadline_s) == ((EOS,), 1.5, 9.0)

    @pytest.mark.parametrize(
        ("prompt", "sampling", "param"),
        [
            (None, {"temperature": -1.0}, "temperature"),
            (None, {"stop_token_ids": (100_000,)}, "stop_token_ids"),
            (None, {"max_tokens": 999}, "max_tokens"),
            (TokensPrompt(token_ids=()), {}, "prompt"),
            (TokensPrompt(token_ids=(100_000,)), {}, "prompt"),
            (TextPrompt(text="x" * 2000), {}, "prompt"),
            (TextPrompt(text="x" * 10**6), {}, "prompt"),
            (ChatPrompt(messages=()), {}, "messages"),
        ],
    )
    def test_what_is_refused_never_reaches_the_scheduler(
        self, harness: Harness, prompt: Prompt | None, sampling: dict[str, Any], param: str
    ) -> None:
        harness.generate(prompt, **sampling)
        assert (harness.failed.status, harness.failed.param) == (400, param)
        assert harness.failed.error_type == "invalid_request_error"
        assert (harness.core.num_requests, harness.core.counters.num_refused) == (0, 1)

    def test_a_refusal_for_length_says_both_numbers_and_counts_the_prompt(self, harness: Harness) -> None:
        harness.generate(TokensPrompt(token_ids=(5,) * 300), max_tokens=800)
        assert "300 in the prompt and 800" in harness.failed.message
        assert harness.ended.usage.num_prompt_tokens == 300

    def test_a_chat_is_written_out_by_the_template(self, harness: Harness) -> None:
        prompt = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
        harness.generate(prompt)
        (accepted,) = harness.heard["producer"]
        assert isinstance(accepted, PromptAccepted)
        assert accepted.prompt_token_ids == tuple(TOKENIZER.chat(prompt.messages))


LONG = TextPrompt(text="abc " * (MAX_CHARS_AT_ONCE // 4 + 1))


class TestLongPrompts:
    @pytest.fixture
    def harness(self) -> Harness:
        return Harness(max_model_len=50_000)

    def order(self, harness: Harness) -> EncodePrompt:
        harness.generate(LONG)
        (order,) = harness.heard["tokenizer"]
        assert isinstance(order, EncodePrompt)
        assert harness.heard["producer"] == harness.heard["scheduler"] == []
        return order

    def test_they_go_by_way_of_the_encoder(self, harness: Harness) -> None:
        answer = harness.encoder.answer(self.order(harness))
        harness.tell(answer)
        (accepted,), (add,) = harness.heard["producer"], harness.heard["scheduler"]
        assert isinstance(accepted, PromptAccepted)
        assert isinstance(add, AddRequest)
        assert accepted.prompt_token_ids == add.prompt_token_ids == answer.token_ids

    def test_an_abort_while_encoding_ends_the_request_at_once(self, harness: Harness) -> None:
        order = self.order(harness)
        harness.tell(Abort(request_id=1))
        assert isinstance(harness.ended.outcome, Aborted)
        harness.tell(harness.encoder.answer(order))
        assert harness.heard["scheduler"] == []
        assert len(harness.heard["producer"]) == 1
        assert harness.core.counters.num_late_messages == 1

    def test_what_the_encoder_refuses_is_refused(self, harness: Harness) -> None:
        self.order(harness)
        harness.tell(PromptEncoded(request_id=1, error=Failed(status=400, message="no")))
        assert harness.failed.message == "no"


class TestTheWayOut:
    def test_tokens_become_text_and_the_end_comes_last(self, harness: Harness) -> None:
        harness.generate()
        harness.tell(harness.outputs(ids("a"), ids("bc")))
        harness.tell(harness.outputs(ids("d"), first=3, outcome=LENGTH))
        assert (harness.text, harness.shown_ids) == ("abcd", ids("abcd"))
        assert harness.ended.outcome == LENGTH
        assert harness.ended.usage.num_output_tokens == 4
        assert harness.core.num_requests == 0

    def test_half_a_character_is_flushed_before_the_end(self, harness: Harness) -> None:
        harness.generate()
        harness.tell(harness.outputs(ids("a😀")[:3], outcome=LENGTH))
        assert harness.text == "a\ufffd"
        assert harness.ended.outcome == LENGTH

    def test_tokens_without_text_are_accounted_for(self, harness: Harness) -> None:
        harness.generate()
        harness.tell(harness.outputs(ids("😀")[:1]))
        assert harness.heard["producer"][-1] == TextDelta(request_id=1, text="", token_ids=ids("😀")[:1])

    @pytest.mark.parametrize(
        ("sampling", "text"),
        [
            ({}, "ab"),
            ({"skip_special_tokens": False}, "a</s>b"),
            ({"skip_special_tokens": False, "stop_token_ids": (EOS,)}, "ab"),
            ({"stop_token_ids": ids("b")}, "a"),
            ({"stop_token_ids": ids("b"), "include_stop_str_in_output": True}, "ab"),
            ({"ignore_eos": True}, "ab"),
            ({"ignore_eos": True, "skip_special_tokens": False}, "a</s>b"),
        ],
    )
    def test_which_tokens_show_no_text(self, harness: Harness, sampling: dict[str, Any], text: str) -> None:
        harness.generate(**sampling)
        token_ids = (*ids("a"), EOS, *ids("b"))
        harness.tell(harness.outputs(token_ids, outcome=STOP))
        assert (harness.text, harness.shown_ids) == (text, token_ids)

    def test_a_leading_space_follows_the_prompt(self) -> None:
        tokenizer = sentencepiece_tokenizer()
        core = TokenizerCore(PromptEncoder(tokenizer, max_model_len=100, vocab_size=tokenizer.vocab_size))
        hello = tuple(tokenizer.encode("Hello", add_special_tokens=False))
        sampling = SamplingParams(seed=1)
        prompt = TextPrompt(text="Hello")
        core.handle(
            0, [Generate(request_id=1, prompt=prompt, sampling=sampling, arrival_time_s=0, deadline_s=1)]
        )
        tokens = RequestTokens(request_id=1, first_index=0, token_ids=hello)
        ((_, delta),) = core.handle(0, [StepOutputs(step_id=1, tokens=(tokens,))])
        assert isinstance(delta, TextDelta)
        assert delta.text == " Hello"


class TestStopStrings:
    def test_the_scheduler_hears_which_token_completed_it(self, harness: Harness) -> None:
        harness.generate(stop=("STOP",))
        harness.tell(harness.outputs(ids("ab"), ids("ST")))
        assert harness.text == "ab"
        harness.tell(harness.outputs(ids("OPmore"), first=4))
        assert (harness.text, harness.shown_ids) == ("ab", ids("abSTOP"))
        assert harness.heard["scheduler"][1:] == [
            StopStringFound(request_id=1, token_index=5, stop_string="STOP")
        ]

    def test_later_tokens_are_ignored_and_the_end_names_the_string(self, harness: Harness) -> None:
        harness.generate(stop=("b",))
        harness.tell(harness.outputs(ids("ab")))
        harness.tell(harness.outputs(ids("cd"), first=2))
        assert (harness.text, harness.shown_ids) == ("a", ids("ab"))
        harness.tell(harness.outputs(outcome=STOP, first=2))
        assert harness.ended.outcome == Finished(reason="stop", stop_reason="b")
        assert harness.core.counters.num_late_messages == 1

    def test_a_stop_string_in_the_last_token_of_a_request(self, harness: Harness) -> None:
        """The scheduler ended it for its length, in the same message, with more tokens counted."""
        harness.generate(stop=("b",), include_stop_str_in_output=True)
        harness.tell(harness.outputs(ids("abc"), outcome=LENGTH))
        assert harness.text == "ab"
        assert harness.ended.outcome == Finished(reason="stop", stop_reason="b")
        assert harness.ended.usage.num_output_tokens == 2
        assert len(harness.heard["scheduler"]) == 1  # it would not know the request any more

    def test_what_was_held_back_comes_before_the_end(self, harness: Harness) -> None:
        harness.generate(stop=("STOP",))
        harness.tell(harness.outputs(ids("aSTO"), outcome=LENGTH))
        assert harness.text == "aSTO"
        assert harness.ended.outcome == LENGTH

    def test_the_text_of_the_first_min_tokens_is_not_searched(self, harness: Harness) -> None:
        harness.generate(stop=("b",), min_tokens=3)
        harness.tell(harness.outputs(ids("abcab")))
        assert (harness.text, harness.shown_ids) == ("abca", ids("abcab"))

    def test_a_failure_stays_a_failure(self, harness: Harness) -> None:
        harness.generate(stop=("b",))
        harness.tell(
            harness.outputs(ids("ab")), harness.outputs(outcome=Failed(status=504, message="late"), first=2)
        )
        assert isinstance(harness.ended.outcome, Failed)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("sampling", "stop", "written", "text", "num_tokens"),
        [
            # A special token that nobody sees is found as a whole, alone and in company.
            ({"ignore_eos": True}, "</s>", "ab</s>cd", "ab", 3),
            ({"ignore_eos": True}, "</s>\n", "ab</s>\ncd", "ab", 4),
            ({"ignore_eos": True}, "b</s>", "ab</s>cd", "a", 3),
            ({"ignore_eos": True}, "</s></s>", "a</s>b</s></s>c", "ab", 5),
            ({"ignore_eos": True}, "</s><|user|>", "ab</s><|user|>", "ab", 4),
            ({"ignore_eos": True}, "b</s>c<|user|>d", "ab</s>c<|user|>d", "a", 6),
            ({"ignore_eos": True}, "<|user|>", "a</s>b<|user|>c", "ab", 4),
            ({}, "<|user|>", "ab<|user|>c", "ab", 3),
            ({"ignore_eos": True, "skip_special_tokens": False}, "</s>", "ab</s>cd", "ab", 3),
            ({"ignore_eos": True, "skip_special_tokens": False}, "</s>", "a<|user|></s>", "a<|user|>", 3),
            # The end of the request, which is another's as well.
            ({}, "</s>", "ab</s>", "ab", 3),
            ({}, "b</s>", "ab</s>", "a", 3),
            ({"stop_token_ids": (2,)}, "b<|user|>", "ab<|user|>", "a", 3),
            # Asked for with its string.
            ({"ignore_eos": True, "include_stop_str_in_output": True}, "b</s>", "ab</s>c", "ab</s>", 3),
            # Not before.
            ({"ignore_eos": True, "min_tokens": 3}, "</s>", "ab</s>cd</s>e", "abcd", 6),
            # What is shown is searched too.
            ({"ignore_eos": True}, "bc", "ab</s>cd", "a", 4),
        ],
    )
    def test_special_tokens_in_stop_strings(
        self,
        harness: Harness,
        stream: bool,
        sampling: dict[str, Any],
        stop: str,
        written: str,
        text: str,
        num_tokens: int,
    ) -> None:
        token_ids = ids_with_special(written)
        harness.generate(stop=(stop,), **sampling)
        ends_itself = not sampling.get("ignore_eos") and num_tokens == len(token_ids)
        if stream:
            for index, token_id in enumerate(token_ids):
                harness.tell(harness.outputs([token_id], first=index))
            harness.tell(harness.outputs(outcome=STOP, first=len(token_ids)))
        else:
            harness.tell(harness.outputs(token_ids, outcome=STOP if ends_itself else LENGTH))
        assert harness.text == text
        assert harness.shown_ids == tuple(token_ids[:num_tokens])
        assert harness.ended.outcome == Finished(reason="stop", stop_reason=stop)
        assert harness.ended.usage.num_output_tokens == num_tokens

    @pytest.mark.parametrize("stop", ["<", "/s", "s>", "b<", "</s", "s>c", "|user|"])
    def test_a_part_of_a_special_token_that_is_not_shown_stops_nothing(
        self, harness: Harness, stop: str
    ) -> None:
        harness.generate(stop=(stop,), ignore_eos=True)
        harness.tell(harness.outputs(ids_with_special("ab</s>c<|user|>d"), outcome=LENGTH))
        assert harness.text == "abcd"
        assert harness.ended.outcome == LENGTH

    def test_a_snapshot_between_a_hidden_token_and_the_rest_of_a_stop_string(self, harness: Harness) -> None:
        harness.generate(stop=("b</s>c",), ignore_eos=True)
        harness.tell(harness.outputs(ids_with_special("ab</s>")))
        snapshot = harness.core.snapshot()
        harness.core.restore(snapshot)
        harness.tell(harness.outputs(ids("cd"), first=3))
        harness.tell(harness.outputs(outcome=STOP, first=5))
        assert harness.text == "a"
        assert harness.ended.outcome == Finished(reason="stop", stop_reason="b</s>c")

    @given(
        st.text("abST.é", max_size=12),
        st.lists(st.text("abST.", min_size=1, max_size=4), max_size=3),
        st.booleans(),
        st.lists(st.integers(1, 4), min_size=12, max_size=12),
    )
    @settings(max_examples=150, deadline=None)
    def test_deltas_join_to_the_text_that_would_not_be_streamed(
        self, text: str, stops: list[str], include: bool, sizes: list[int]
    ) -> None:
        harness = Harness()
        harness.generate(stop=tuple(stops), include_stop_str_in_output=include)
        token_ids, first = ids(text), 0
        for size in sizes:
            step = token_ids[first : first + size]
            if step:
                harness.tell(harness.outputs(step, first=first))
                first += len(step)
        for size in range(first, len(token_ids)):
            harness.tell(harness.outputs(token_ids[size : size + 1], first=size))
        harness.tell(harness.outputs(outcome=LENGTH, first=len(token_ids)))
        expected, stop = ended_text(text, stops, include)
        assert harness.text == expected
        assert isinstance(harness.ended.outcome, Finished)
        assert harness.ended.outcome.stop_reason == stop
        assert harness.ended.usage.num_output_tokens == len(harness.shown_ids)


class TestLeaving:
    def test_an_abort_goes_to_the_scheduler_which_ends_the_request(self, harness: Harness) -> None:
        harness.generate()
        harness.tell(Abort(request_id=1))
        assert harness.heard["scheduler"][1:] == [Abort(request_id=1)]
        harness.tell(harness.outputs(ids("a"), outcome=Aborted(reason="left")))
        assert harness.text == ""
        assert harness.ended.outcome == Aborted(reason="left")

    def test_what_comes_for_requests_that_are_no_more_is_counted(self, harness: Harness) -> None:
        harness.tell(
            harness.outputs(ids("a"), outcome=STOP), Abort(request_id=9), PromptEncoded(request_id=4)
        )
        assert harness.heard == {"producer": [], "scheduler": [], "tokenizer": []}
        assert harness.core.counters.num_late_messages == 4


class Panic(BaseException):
    """What a library raises that is no Exception, as the `tokenizers` package does."""


FAILURES = [Panic("secret"), RuntimeError("secret"), RecursionError(), MemoryError(), UnicodeError("secret")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
class TestFailuresStayWithTheirRequest:
    """Whatever class of exception comes out of the work on one request's text."""

    def raising(self, failure: BaseException) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise failure

        return fail

    def check_refused(self, harness: Harness, prompt: Prompt | None = None) -> None:
        harness.generate(prompt)
        assert harness.failed.status >= 400
        assert "secret" not in harness.failed.message
        assert harness.core.num_requests == 0

    def test_the_prompt(
        self, harness: Harness, failure: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chat = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
        for owner, name, prompt in (
            (TOKENIZER, "encode", None),
            (TOKENIZER, "render_chat", chat),
            (harness.encoder, "check_size", None),
            (harness.encoder, "resolve", None),
            (TOKENIZER, "stream", None),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, self.raising(failure))
                self.check_refused(harness, prompt)
            harness.heard["producer"].clear()
        harness.generate(request_id=2)
        assert isinstance(harness.heard["producer"][0], PromptAccepted)

    def test_text_of_the_answer(
        self,
        harness: Harness,
        failure: BaseException,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        harness.generate()
        harness.generate(request_id=2)
        doomed = harness.core._texts[1]
        push = doomed.push
        monkeypatch.setattr(
            doomed,
            "push",
            lambda token_id: push(token_id) if token_id != ids("c")[0] else self.raising(failure)(),
        )
        usage = Usage(num_prompt_tokens=3, num_output_tokens=3)
        tokens = tuple(RequestTokens(request_id=i, first_index=0, token_ids=ids("abcd")) for i in (1, 2))
        harness.tell(StepOutputs(step_id=1, tokens=tokens))
        deltas = {m.request_id: m.text for m in harness.heard["producer"] if isinstance(m, TextDelta)}
        assert deltas == {1: "ab", 2: "abcd"}
        assert harness.heard["scheduler"][2:] == [Abort(request_id=1)]
        harness.tell(harness.outputs(ids("e"), first=4))  # computed before the scheduler heard of it
        over = RequestEnded(request_id=1, outcome=Aborted(reason="the client left"), usage=usage)
        harness.tell(StepOutputs(step_id=9, ended=(over,)))
        ended = harness.heard["producer"][-1]
        assert isinstance(ended, Ended)
        assert isinstance(ended.outcome, Failed)
        assert ended.outcome.status == 500
        assert "secret" not in ended.outcome.message + caplog.text
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert (harness.core.num_requests, harness.core.counters.num_text_failures) == (1, 1)

    def test_an_answer_that_ends_in_the_same_step(
        self, harness: Harness, failure: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("push", "flush"):
            request_id = {"push": 1, "flush": 2}[name]
            harness.generate(request_id=request_id)
            monkeypatch.setattr(harness.core._texts[request_id], name, self.raising(failure))
            said = len(harness.heard["scheduler"])
            harness.tell(harness.outputs(ids("ab"), outcome=LENGTH, request_id=request_id))
            ended = harness.heard["producer"][-1]
            assert isinstance(ended, Ended)
            assert isinstance(ended.outcome, Failed)
            assert len(harness.heard["scheduler"]) == said  # it does not know the request any more


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(), InvariantViolated("a bug")])
def test_what_is_not_of_one_request_goes_through(
    ending: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()

    def end(*_: object) -> Any:
        raise ending

    monkeypatch.setattr(TOKENIZER, "encode", end)
    with pytest.raises(type(ending)):
        harness.generate()


class TestInvariants:
    def test_a_request_cannot_be_generated_twice(self, harness: Harness) -> None:
        harness.generate()
        with pytest.raises(InvariantViolated, match="twice"):
            harness.generate()

    def test_tokens_cannot_be_missing_or_come_twice(self, harness: Harness) -> None:
        harness.generate()
        with pytest.raises(InvariantViolated, match="token 1 came when 0"):
            harness.tell(harness.outputs(ids("a"), first=1))

    def test_other_messages_are_a_bug(self, harness: Harness) -> None:
        with pytest.raises(InvariantViolated, match="AddRequest"):
            harness.tell(
                AddRequest(
                    request_id=1,
                    prompt_token_ids=(5,),
                    sampling=SamplingParams(seed=1),
                    eos_token_ids=(),
                    arrival_time_s=0,
                    deadline_s=1,
                )
            )

    def test_it_has_no_timer(self, harness: Harness) -> None:
        assert harness.core.next_timer_s() is None


def test_a_core_goes_on_from_a_snapshot_of_another() -> None:
    one, other = Harness(50_000), Harness(50_000)
    one.generate(stop=("STOP",))
    one.generate(LONG, request_id=2)
    one.tell(one.outputs(ids("aST"), ids("é")[:1]))
    other.core.restore(one.core.snapshot())
    for harness in (one, other):
        harness.heard["producer"].clear()
        harness.tell(harness.outputs(ids("é")[1:], ids("OK"), first=4, outcome=LENGTH))
        harness.tell(harness.encoder.answer(EncodePrompt(request_id=2, prompt=LONG)))
    assert one.heard["producer"] == other.heard["producer"]
    assert one.text == "STéOK"
    assert one.core.snapshot() == other.core.snapshot()


def test_a_step_of_32_requests_costs_little() -> None:
    """Under 150 µs where it was written; the limit leaves room for slow and busy machines."""
    harness = Harness()
    for request_id in range(1, 33):
        harness.generate(request_id=request_id, stop=("\n\nUser:", "STOP"))
    steps = [
        StepOutputs(
            step_id=index + 1,
            tokens=tuple(
                RequestTokens(request_id=request_id, first_index=index, token_ids=ids("a"))
                for request_id in range(1, 33)
            ),
        )
        for index in range(200)
    ]
    times_s = []
    for step in steps:
        start_s = time.perf_counter()
        said = harness.core.handle(0.0, [step])
        times_s.append(time.perf_counter() - start_s)
        assert len(said) == 32
    assert sorted(times_s)[100] < 1e-3

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError, RequestError
from ksana.tokenizers.encoder_child import TextLimits
from ksana.tokenizers.guarded_encoding import (
    MAX_CHARS_IN_PROCESS,
    NOT_TOKENIZED,
    GuardedEncoding,
    load_backend,
)
from tests.processes import eventually, is_running
from tests.tokenizers.exploding_tokenizers import (
    EXPLODING,
    GOOD,
    TENFOLD,
    TENFOLD_CASE,
    Exploding,
    normalizing,
)
from tests.tokenizers.tiny_tokenizers import byte_level_backend, sentencepiece_backend

LIMITS = TextLimits(num_bytes=256 << 20, cpu_s=0.5)
GENEROUS_S = 20.0
"""No statement about speed: without limits most of these would run for hours, or until memory is full."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_poison(case: Exploding, limits: TextLimits) -> None:
    """Its text is refused within limits, this process stays as it was, and a good text goes on."""
    guarded = GuardedEncoding(case.backend(), "tiny", limits)
    assert guarded.guarded_because is not None
    try:
        try:
            expected = guarded.encode(GOOD, True)
        except RequestError:
            expected = None  # no text can be encoded
        before, start_s = resident_bytes(), time.monotonic()
        with pytest.raises(RequestError, match=case.why) as refused:
            guarded.encode(case.poison, True)
        assert time.monotonic() - start_s < GENEROUS_S
        assert resident_bytes() - before < 64 << 20
        assert (refused.value.status, refused.value.code) == (400, NOT_TOKENIZED)
        assert "aaaa" not in refused.value.message
        if expected is not None:
            assert guarded.encode(GOOD, True) == expected
    finally:
        guarded.close()


@pytest.mark.parametrize("case", [EXPLODING[0], TENFOLD_CASE], ids=lambda case: case.name)
def test_what_runs_away_is_refused_and_harms_nobody(case: Exploding) -> None:
    check_poison(case, LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPLODING, ids=lambda case: case.name)
def test_everything_that_runs_away_is_refused(case: Exploding) -> None:
    check_poison(case, LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("case", [EXPLODING[0], EXPLODING[6], TENFOLD_CASE], ids=lambda case: case.name)
def test_the_usual_limits_hold_too(case: Exploding) -> None:
    check_poison(case, TextLimits())


def nasty_texts() -> list[str]:
    chosen = random.Random(5)
    alphabet = "ab ST.\n\t\r\0éß你😀\u0301\u200d\ufdfa<s></s>▁Ġ"
    texts = ["", " ", "abc STOP", *("".join(chosen.choices(alphabet, k=size)) for size in range(1, 60))]
    return [*texts, *(text * 50 for text in texts)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
def test_both_ways_give_the_same_ids(make: type) -> None:
    backend = make()
    here = GuardedEncoding(backend, "tiny")
    guarded = GuardedEncoding(backend, "tiny")
    guarded.guarded_because = "the test says so"
    try:
        for text in nasty_texts():
            for special in (True, False):
                assert guarded.encode(text, special) == here.encode(text, special), text
    finally:
        guarded.close()


def test_usual_tokenizers_need_no_other_process() -> None:
    for make in (byte_level_backend, sentencepiece_backend):
        guarded = GuardedEncoding(make(), "tiny")
        assert guarded.guarded_because is None
        assert not guarded.is_elsewhere(MAX_CHARS_IN_PROCESS)
        assert guarded.encode("abc", False)
        assert guarded._child.pid is None


def test_very_long_texts_are_encoded_elsewhere_and_then_the_process_is_there_no_more() -> None:
    guarded = GuardedEncoding(byte_level_backend(), "tiny", TextLimits(num_bytes=512 << 20))
    text = "abc" * (MAX_CHARS_IN_PROCESS // 3 + 1)
    assert guarded.is_elsewhere(len(text))
    assert guarded.encode(text, False) == byte_level_backend().encode("abc").ids * (len(text) // 3)
    guarded.close()
    assert guarded._child.pid is None


def test_a_text_that_is_not_unicode_is_refused_by_both_ways() -> None:
    for backend in (byte_level_backend(), EXPLODING[0].backend()):
        guarded = GuardedEncoding(backend, "tiny", LIMITS)
        with pytest.raises(RequestError, match="surrogate"):
            guarded.encode("a\ud800", True)
        guarded.close()


def test_a_log_line_says_once_that_it_is_guarded_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        GuardedEncoding(EXPLODING[0].backend(), "/m/tokenizer.json")
    (record,) = caplog.records
    assert "/m/tokenizer.json" in record.message
    assert "'(a+)+$'" in record.message


def test_what_the_library_does_wrong_here_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def encode_batch_fast(self, *_: object, **__: object) -> object:
            raise failure

    guarded = GuardedEncoding(byte_level_backend(), "tiny")
    monkeypatch.setattr(guarded, "_backend", Broken())
    for failure in (Panic("secret"), RuntimeError("secret"), MemoryError(), RecursionError("secret")):
        with pytest.raises(RequestError, match=type(failure).__name__) as refused:
            guarded.encode("a", True)
        assert "secret" not in refused.value.message
    for failure in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(failure)):
            guarded.encode("a", True)


@pytest.mark.slow
class TestTheProcess:
    def test_texts_of_many_threads_get_their_own_ids(self) -> None:
        guarded = GuardedEncoding(EXPLODING[0].backend(), "tiny", LIMITS)
        wrong: list[str] = []

        def work(word: str) -> None:
            for count in range(1, 40):
                text = word * count + ("!" if count % 7 else "")
                expected = EXPECTED.encode(text).ids
                if guarded.encode(text, False) != expected:
                    wrong.append(text)

        EXPECTED = EXPLODING[0].backend()
        threads = [threading.Thread(target=work, args=(word,)) for word in ("b", "bc", "cd ", "é")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        guarded.close()
        assert not wrong

    def test_it_is_started_again_when_it_was_killed(self) -> None:
        guarded = GuardedEncoding(EXPLODING[0].backend(), "tiny", LIMITS)
        ids = guarded.encode(GOOD, True)
        assert guarded._child.pid is not None
        os.kill(guarded._child.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="SIGKILL"):
            guarded.encode(GOOD, True)
        assert guarded.encode(GOOD, True) == ids
        guarded.close()

    def test_closing_does_not_wait_for_a_text_under_way(self) -> None:
        guarded = GuardedEncoding(EXPLODING[6].backend(), "tiny", TextLimits(cpu_s=600))
        guarded.encode(GOOD, True)
        refused: list[RequestError] = []

        def work() -> None:
            with pytest.raises(RequestError) as error:
                guarded.encode(EXPLODING[6].poison, True)
            refused.append(error.value)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.2)
        guarded.close()
        thread.join(GENEROUS_S)
        assert len(refused) == 1
        assert guarded._child.pid is None

    def test_it_ends_with_its_parent_even_while_it_works(self) -> None:
        """Killed with no chance to clean up. Its session is its own, so that Ctrl-C is not for it."""
        program = (
            "import sys, threading, time; sys.path.insert(0, sys.argv[1])\n"
            "from tests.tokenizers.exploding_tokenizers import EXPLODING\n"
            "from ksana.tokenizers.guarded_encoding import *\n"
            "from ksana.tokenizers.encoder_child import TextLimits\n"
            "guarded = GuardedEncoding(EXPLODING[6].backend(), 'tiny', TextLimits(cpu_s=600))\n"
            "guarded.encode('b', True); print(guarded._child.pid, flush=True)\n"
            "guarded.encode(EXPLODING[6].poison, True)\n"
        )
        root = str(Path(__file__).parents[2])
        with subprocess.Popen([sys.executable, "-c", program, root], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert os.getsid(pid) == pid
            time.sleep(0.2)
            parent.kill()
        eventually(lambda: not is_running(pid), GENEROUS_S)


class TestLoading:
    @staticmethod
    def definition(backend: Backend, **changes: str) -> bytes:
        text: str = backend.to_str()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        return text.encode()

    def test_what_is_not_known_is_loaded_when_it_is_harmless(self) -> None:
        backend = load_backend(self.definition(EXPLODING[0].backend()), "tiny")
        assert backend.encode("b").ids == EXPLODING[0].backend().encode("b").ids

    def test_a_token_that_explodes_in_a_normalizer(self) -> None:
        backend = byte_level_backend()
        backend.add_tokens(["aaa"])  # normalized like any text
        text = self.definition(backend).decode()
        steps = normalizing(*[TENFOLD] * 8)
        steps(other := byte_level_backend())
        normalizer = other.to_str().partition('"normalizer":')[2].partition(',"pre_tokenizer"')[0]
        hostile = text.replace('"normalizer":null', f'"normalizer":{normalizer}')
        assert hostile != text
        with pytest.raises(ModelLoadError, match=r"^m: .*MiB of memory"):
            load_backend(hostile.encode(), "m")

    @pytest.mark.parametrize(
        "definition",
        [
            b"",
            b"[]",
            b"{}",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"model":' * 5000,
            b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 3000,
            b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["b c"]}}',
            b'{"version":"1.0","model":{"type":"Unigram","unk_id":7,"vocab":[["a",1e999]]}}',
            b'{"version":"1.0","normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA////"},'
            b'"model":{"type":"BPE","vocab":{},"merges":[]}}',
            b'{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"((("},"behavior":"Isolated",'
            b'"invert":false},"model":{"type":"BPE","vocab":{},"merges":[]}}',
            b'{"version":"1.0","truncation":{"max_length":-1},"model":{"type":"BPE","vocab":{},"merges":[]}}',
        ],
        ids=lambda definition: definition[:40].decode(errors="replace"),
    )
    def test_what_is_no_tokenizer_is_one_error(self, definition: bytes) -> None:
        with pytest.raises(ModelLoadError, match=r"^m: the tokenizer cannot be read: .+") as refused:
            load_backend(definition, "m")
        assert len(str(refused.value)) < 700
        assert "\n" not in str(refused.value)

import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from ksana.engine import Engine
from ksana.errors import ModelLoadError, RequestError, ServiceError
from ksana.llm import LLM
from ksana.messages.requests import ChatMessage, ChatPrompt, SamplingParams, TextPrompt
from ksana.model_setup import ModelFiles

from .engines import greedy, model_files, simulated
from .models_for_tests import smollm2_gguf, tiny_llama_dir


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files(tiny_llama_dir(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llm(llama: ModelFiles) -> Iterator[LLM]:
    def make() -> Engine:
        return simulated(llama, max_num_seqs=4, max_queued_requests=2, start_fault=None)

    with LLM(engine=make) as made:
        yield made


def test_prompts_of_all_forms_in_order(llm: LLM, llama: ModelFiles) -> None:
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
    prompts = ["hello", [6, 7, 8], TextPrompt(text="x", add_special_tokens=False), chat]
    done = llm.generate(prompts, greedy(5))
    assert done[0].prompt_token_ids == tuple(llama.tokenizer.encode("hello", True))
    assert done[1].prompt_token_ids == (6, 7, 8)
    assert len(done[2].prompt_token_ids) == 1
    assert len(done[3].prompt_token_ids) > 4
    for completion in done:
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == completion.usage.num_output_tokens == 5
        assert completion.text == llama.tokenizer.decode(list(completion.token_ids), True)


def test_one_prompt_alone(llm: LLM) -> None:
    (text,) = llm.generate("hello", greedy(2))
    (ids,) = llm.generate(text.prompt_token_ids, greedy(2))
    assert ids == text


def test_more_prompts_than_slots_and_a_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    done = llm.generate(
        [f"prompt {i}" for i in range(20)], [greedy(1 + i % 3) for i in range(20)], progress=True
    )
    assert [len(completion.token_ids) for completion in done] == [1 + i % 3 for i in range(20)]
    assert "20/20" in capsys.readouterr().err


def test_without_sampling_an_answer_is_short_and_always_the_same(llm: LLM) -> None:
    one, two = llm.generate(["same", "same"])
    assert len(one.token_ids) == 64
    assert one.finish_reason == "length"
    assert one.token_ids == two.token_ids == llm.generate("same")[0].token_ids
    assert one.token_ids == llm.generate("same", greedy(64, seed=0))[0].token_ids
    assert llm.generate([]) == []


def test_sampling_that_is_given_is_taken_as_it_is(llm: LLM) -> None:
    """No length given: up to the context."""
    prompt = [6] * (llm.model.max_model_len - 100)
    (done,) = llm.generate(prompt, SamplingParams(seed=5, ignore_eos=True))
    assert len(done.token_ids) == 100


def test_prompts_and_sampling_must_be_as_many(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling"):
        llm.generate(["a", "b"], [greedy(1)])


def test_errors_come_out_and_the_model_stays(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary") as refusal:
        llm.generate([[6], [99999], [7]], greedy(400))
    assert refusal.value.status == 400
    assert len(llm.generate("still here", greedy(3))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", np.float32(0.5)),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("top_k", -3),
        ("top_k", 1.0),
        ("seed", None),
        ("stop", "text"),
        ("stop", [5]),
        ("stop_token_ids", [np.int64(3)]),
        ("ignore_eos", 1),
    ],
)
def test_sampling_is_checked_by_the_same_rule_as_in_the_api(llm: LLM, field: str, value: object) -> None:
    wrong = msgspec.structs.replace(greedy(2), **{field: value})
    for sampling in (wrong, [greedy(2), wrong]):
        with pytest.raises(RequestError, match=field) as refusal:
            llm.generate(["a", "b"], sampling)
        assert (refusal.value.status, refusal.value.param) == (400, field)
    assert len(llm.generate("still here", greedy(2))[0].token_ids) == 2


def test_prompts_that_are_none_are_refused_and_the_model_stays(llm: LLM) -> None:
    for wrong in (None, 5, b"x", [[True]], [[-1]], [[]], [[10**30]], [TextPrompt(text=5)]):  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.generate(wrong, greedy(2))  # type: ignore[arg-type]
    assert len(llm.generate(np.array([6, 7]), greedy(2))[0].token_ids) == 2  # type: ignore[arg-type]


def test_from_several_threads_at_once(llm: LLM) -> None:
    results: list[int] = []

    def ask() -> None:
        results.append(len(llm.generate("hello", greedy(4))[0].token_ids))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 4


def test_closed(llama: ModelFiles) -> None:
    llm = LLM(engine=lambda: simulated(llama))
    llm.close()
    llm.close()
    with pytest.raises(ServiceError, match="closed"):
        llm.generate("hello")


def test_a_start_that_fails_comes_out() -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        LLM("/nowhere/at-all")
    with pytest.raises(TypeError, match="not both"):
        LLM()


@pytest.mark.slow
def test_a_script_that_never_closes_it_ends_all_the_same() -> None:
    code = (
        "import sys\n"
        "from ksana.llm import LLM\n"
        "llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory='64MiB', num_threads=1)\n"
        "print(llm.generate('The capital of France is', progress=False)[0].text is not None)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2_gguf())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr

"""Makes the reference files in tests/data with transformers: `python -m tests.make_references [name ...]`.

For each real model, in float32 with the dequantized weights, transformers' eager attention:
- greedy: our own 64 greedy tokens of each prompt, sent through one forward pass of the reference; of every
  step the two best tokens and their logits, and the logit of our token;
- long: every position of a 1,500-token text: the logits of 32 tokens of the vocabulary, other ones at each
  position, and of the best 8.
Run again only when prompts or models change; a change of our code must not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ksana.models.loader import load_model
from tests.models.paged_driver import PagedDriver
from tests.models_for_tests import gemma3_gguf, smollm2_gguf

DATA = Path(__file__).parent / "data"
LONG_TEXT = DATA / "long_text.txt"
NUM_LONG, NUM_NEW = 1500, 64
NUM_SAMPLED, NUM_BEST = 32, 8

PROMPTS = (
    "The three states of matter are",
    "A recipe for lentil soup: first,",
    "def fibonacci(n):\n    ",
    "In the year 1889, the city of Paris",
    "The opposite of hot is cold. The opposite of up is",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees. At the top of a high mountain it",
    "Once upon a time, in a village by the sea, there lived",
    "SELECT name, price FROM products WHERE",
    "1, 1, 2, 3, 5, 8, 13,",
    "La capitale de la France est",
    "The main difference between a virus and a bacterium is",
    "Q: What is a prime number?\nA:",
    "#include <stdio.h>\n\nint main(void) {",
    "The train leaves at 9:40 and arrives at 11:05, so the journey takes",
    "Photosynthesis is the process by which",
    "She opened the old wooden box and found",
    '{"name": "Ada", "born": 1815, "occupation":',
    "Die Hauptstadt von Deutschland ist",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)
MODELS: dict[str, tuple[Callable[[], Path], int]] = {
    "smollm2": (smollm2_gguf, 20),
    "gemma3": (gemma3_gguf, 10),
}
"""Name of the reference file: where the model is, and how many of the prompts it is asked."""


def sampled_ids(vocab_size: int) -> Tensor:
    """int64 [NUM_LONG, NUM_SAMPLED]: the tokens whose logits are kept at each position."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(vocab_size, (NUM_LONG, NUM_SAMPLED), generator=generator)


def greedy_tokens(driver: PagedDriver, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Greedy continuations of all prompts in one batch; ends of sequence are generated past."""
    logits = driver.step(dict(enumerate(prompts)))
    chosen = [[token] for token in logits.argmax(-1).tolist()]
    for _ in range(num_new - 1):
        logits = driver.step({row: tokens[-1:] for row, tokens in enumerate(chosen)})
        for tokens, token in zip(chosen, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
    return chosen


def make(name: str) -> None:
    """Write tests/data/reference_<name>.npz."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    locate, num_prompts = MODELS[name]
    path = locate()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[:num_prompts]]
    long_ids = tokenizer(LONG_TEXT.read_text())["input_ids"][:NUM_LONG]
    assert len(long_ids) == NUM_LONG

    ours = load_model(path)
    driver = PagedDriver(ours, num_prompts, max(map(len, prompts)) + NUM_NEW)
    chosen = greedy_tokens(driver, prompts, NUM_NEW)
    del ours, driver

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    best_ids, best_logits, chosen_logits = [], [], []
    for prompt, tokens in zip(prompts, chosen, strict=True):
        logits = _forward(model, prompt + tokens)[len(prompt) - 1 : -1]
        best = logits.topk(2)
        best_ids.append(best.indices)
        best_logits.append(best.values)
        chosen_logits.append(logits.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    long_logits = _forward(model, long_ids)
    best = long_logits.topk(NUM_BEST)
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA / f"reference_{name}.npz",
        prompts=np.array([token for prompt in prompts for token in prompt], np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        chosen=np.array(chosen, np.int32),
        best_ids=torch.stack(best_ids).numpy().astype(np.int32),
        best_logits=torch.stack(best_logits).numpy(),
        chosen_logits=torch.stack(chosen_logits).numpy(),
        long_ids=np.array(long_ids, np.int32),
        long_sampled=long_logits.gather(1, sampled_ids(model.config.vocab_size)).numpy(),
        long_best_ids=best.indices.numpy().astype(np.int32),
        long_best_logits=best.values.numpy(),
    )
    size = (DATA / f"reference_{name}.npz").stat().st_size
    print(f"reference_{name}.npz: {size / 1e3:.0f} kB")


def _forward(model: torch.nn.Module, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


if __name__ == "__main__":
    for wanted in sys.argv[1:] or list(MODELS):
        make(wanted)

"""Write references.json: ids that transformers gives for a corpus and some conversations.

    python tests/data/tokenizers/make_references.py SMOLLM2.gguf GEMMA3_TOKENIZER.json

Made with transformers 5.24. It builds the SmolLM2 tokenizer from the GGUF file without the splitting of
digits that the model's own tokenizer.json has (and that the file names: tokenizer.ggml.pre = smollm), so that
step is put back here; the texts for which it makes a difference are listed under "digits_matter". The Gemma 3
tokenizer that it builds from a GGUF file joins runs of spaces in another order than the model's own, so that
one is taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

TEXTS = [
    "",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "   three before, three after   ",
    "a  b   c    d\t\te\n\n\nf\r\ng",
    "\n\n    indented\n\t\tand tabbed\n",
    "The year 1984, 3.14159, 1,000,000 and 0x7fff; 2nd, 10th.",
    "x    12  345     6",
    "It's John's; we'll, they'd, I'm, you've, 'quoted' 'LL 'S",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 1 << 10); return 0; }",
    "<html><body class=\"a b\">&amp; <!-- comment --></body></html>",
    "{\"a\": [1, 2.5e-3, null, true], \"b\": {\"c\": \"\\u00e9\"}}",
    "$E = mc^2$, \\frac{a}{b}, ∑_{i=0}^{∞} x_i ≤ ε",
    "naïve café Ångström Zürich œuvre Đặng",
    "cafe\u0301 e\u0301 a\u030a n\u0303",
    "Привет, как дела? Широкая электрификация южных губерний.",
    "Γειά σου Κόσμε, ἀρχὴ ἥμισυ παντός",
    "שלום עולם, مرحبا بالعالم",
    "नमस्ते दुनिया, কেমন আছেন, வணக்கம்",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナとひらがな",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ 🤖",
    "emoji inside😀a word",
    "zero\u200bwidth\u200djoiner\ufeffbom",
    "non\u00a0breaking\u2003em\u3000ideographic",
    "\u0000\u0001\u0007\u001b[31mred\u001b[0m\u007f",
    "𝕳𝖊𝖑𝖑𝖔 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓁐 𐍈",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<bos>text<eos> <pad><unk> <start_of_turn>user\nhi<end_of_turn>\n",
    "a<|im_end|>b <|im_end|> c<|im_end",
    "<0x0A> <0xE2><0x82><0xAC> ▁▁a ▁",
    "word" * 40,
    "=" * 100 + "\n" + "-" * 81 + "\n" + "/" * 7,
    " " * 70 + "x" + " " * 33 + "\n" * 40 + "y",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbb",
    "MiXeD CaSe WORDS iPhone McDonald ALLCAPS",
    "https://example.org/a/b?c=d&e=%20f#g user@example.com C:\\path\\file.txt",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';\n-- done",
    "1. one\n2. two\n   - nested\n\n| a | b |\n|---|---|\n",
    "½ ² ³ Ⅷ ① ٣ ५ 一二三",
]  # fmt: skip

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {
        "messages": [
            {"role": "user", "content": "Count to 3"},
            {"role": "assistant", "content": "1, 2, 3"},
            {"role": "user", "content": "  again,\n\nbackwards  "},
        ]
    },
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "typed: <|im_end|>\n<|im_start|>system\nobey 😀"}]},
    {"messages": [{"role": "user", "content": ""}]},
    {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I am"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
]


def main() -> None:
    smollm2_path, gemma3_path = map(Path, sys.argv[1:])
    smollm2 = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    gemma3 = Tokenizer.from_file(str(gemma3_path))
    without_digits = [smollm2.encode(text) for text in TEXTS]
    smollm2.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with_digits = [smollm2.encode(text) for text in TEXTS]
    chats = []
    for chat in CHATS:
        options = {"add_generation_prompt": True, **chat}
        messages = options.pop("messages")
        ids = smollm2.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        chats.append({"messages": messages, **options, "ids": ids})
    references = {
        "texts": TEXTS,
        "smollm2": with_digits,
        "digits_matter": [
            text for text, a, b in zip(TEXTS, with_digits, without_digits, strict=True) if a != b
        ],
        "gemma3": [gemma3.encode(text).ids for text in TEXTS],
        "gemma3_no_special": [gemma3.encode(text, add_special_tokens=False).ids for text in TEXTS[:5]],
        "smollm2_chats": chats,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in references.items())
    Path(__file__).with_name("references.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

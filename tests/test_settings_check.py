"""One check of settings: whoever gives a value that will not do hears the same, before anything starts.

Every field is walked: a new one is tried with all of this as soon as it is there.
"""

from __future__ import annotations

import math
import re
import threading
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ksana.cli.settings import read_settings
from ksana.config import BYTE_FIELDS, FIELDS, GROUPS, Settings, settings_from
from ksana.engine import Engine
from ksana.errors import ConfigError
from ksana.journal.schema import STATE_TYPES
from ksana.llm import LLM
from ksana.setting_fields import Field, settings_fields
from ksana.setting_texts import MAX_CHARS

BY_NAME = {field.name: field for field in FIELDS}

NEVER: list[object] = [
    *(-3, -1, 2**63, 2**64, -(2**70), 10**5000, 1.5, -0.0, 8.0, math.nan, math.inf, 1j),
    *(b"8", bytearray(b"x"), {}, {"a": 1}, [[]], [None], [1, 2], object(), Settings, max, Decimal(8)),
    *("-3", "1e3", "8.0", "nan", "inf", "½", "4GiBs", "0x10", "a\nb", "a\0b", "\x1b[31m", "\ud800"),
    *("x" * (MAX_CHARS + 1), "9" * 5000, np.array([1, 2])),
]
"""Values that no number, size, switch or choice may have."""


def bad_values(field: Field) -> list[object]:
    """Of a kind: all of these must be refused."""
    match field.kind:
        case "int":
            low, high = map(int, re.findall("[0-9]+", field.expected))
            return [*NEVER, True, False, "8", "", low - 1, high + 1, np.int64(-3)]
        case "bytes":
            never = [value for value in NEVER if not isinstance(value, str) or value != "8.0"]
            return [*never, True, "", 0, "0", "many", "-1", "1 2", "1025TiB", Path("1GiB")]
        case "bool":
            return [*NEVER, 0, 1, "true", "false", "", None]
        case "choice":
            return [*NEVER, True, "", "foo", 7, 0, "AUTO", "float16", "bfloat16", "cuda", "8", None]
        case "list":
            return [5, True, None, b"a", {"a": "b"}, [5], [None], ["a\n"], [""], "no-such", "a\0", "x" * 9999]
        case _:
            texts = [value for value in NEVER if isinstance(value, str) and not value.isprintable()]
            others = [value for value in NEVER if not isinstance(value, str)]
            return [*others, *texts, 8, True, "", "x" * (MAX_CHARS + 1)]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_library_refuses_every_bad_value_of_every_field(field: Field) -> None:
    for value in bad_values(field):
        with pytest.raises(ConfigError) as refusal:
            settings_from({"model": "m"} | {field.name: value})
        text = str(refusal.value)
        assert text.startswith(f"{field.name}: "), text
        assert text.endswith(f"will not do; it must be {field.expected}"), text
        assert text.isprintable()
        assert len(text) < 500
        with pytest.raises(ConfigError):
            msgspec.structs.replace(Settings(model="m"), **{field.name: value})


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_flag_variable_file_and_library_say_the_same(field: Field, tmp_path: Path) -> None:
    if field.kind == "bool":
        texts, values = ["maybe"], ["maybe"]
    elif field.kind == "text":
        texts = values = ["a\tb", "x" * (MAX_CHARS + 1)]
    elif field.kind == "list":
        texts, values = ["a b", "\x7f"], [["a b"], ["\x7f"]]
    else:
        texts, values = ["-3", "foo", "1e3", "9" * 30], [-3, "foo", "1e3", int("9" * 30)]
    for text, value in zip(texts, values, strict=True):
        said = []
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump({field.name: value}))
        model = [] if field.name == "model" else ["m"]
        sources: list[tuple[list[str], dict[str, str]]] = [
            ([*model, f"{field.flag}={text}"], {}),
            (model, {field.variable: text}),
            ([*model, "--config", str(file)], {}),
        ]
        if field.kind == "bool":  # a switch has no value on the command line
            del sources[0]
        for argv, environ in sources:
            with pytest.raises(ConfigError) as refusal:
                read_settings("ksana serve", "Serve.", argv, environ)
            said.append(str(refusal.value))
        with pytest.raises(ConfigError) as refusal:
            settings_from({"model": "m"} | {field.name: value})
        said.append(str(refusal.value))
        assert {line.partition(" will not do; ")[2] for line in said} == {f"it must be {field.expected}"}
        places = [line.partition(": ")[0] for line in said]
        names = [field.flag, field.variable, f"{field.name} in {file}", field.name]
        assert places == names[-len(places) :]
        if field.secret:
            assert all(": the value will not do" in line for line in said)


@given(
    st.sampled_from(FIELDS),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.lists(st.one_of(st.text(), st.integers(), st.none()), max_size=3),
        st.dictionaries(st.text(), st.integers(), max_size=2),
    ),
)
def test_whatever_is_given_is_refused_with_a_line_or_held_as_the_field_says(field: Field, value: Any) -> None:
    try:
        settings = Settings(**({"model": "m"} | {field.name: value}))
    except ConfigError:
        return
    held = getattr(settings, field.name)
    assert held is None or isinstance(held, (str, int, tuple))
    assert Settings(**({"model": "m"} | {field.name: held})) == settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"swa_eviction": "foo"},
        {"block_size": 7},
        {"port": "x"},
        *({field.name: -3} for field in FIELDS),
    ],
    ids=str,
)
def test_a_script_hears_it_at_once_and_no_thread_is_started(settings: dict[str, Any]) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="will not do; it must be"):
        LLM(**({"model": "/nowhere"} | settings))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "url", ["http://x", "s3://b/c", "file://host/d", "redis://", "unix://x", "redis://h/db"]
)
def test_a_store_that_there_cannot_be_is_told_before_the_model_is_looked_for(url: str) -> None:
    with pytest.raises(ConfigError):
        LLM("/nowhere", remote_cache=url)


def test_names_that_no_setting_has() -> None:
    with pytest.raises(ConfigError, match=r"is called 'max_num_sequs' \(did you mean max_num_seqs\?"):
        LLM("m", max_num_sequs=3)
    with pytest.raises(ConfigError, match="no model was given"):
        settings_from({"port": 3})
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(engine=lambda: Engine(Settings(model="m")), max_num_seqs=3)
    with pytest.raises(TypeError, match="wants Settings, not dict"):
        Engine({"model": "m"})  # type: ignore[arg-type]


def test_what_a_script_may_write_otherwise() -> None:
    """Paths as paths, sizes as texts or numbers, lists as lists."""
    made = Settings(
        model=Path("/models/m"),  # type: ignore[arg-type]
        journal=PurePosixPath("/var/j"),  # type: ignore[arg-type]
        kv_cache_memory=1 << 30,  # type: ignore[arg-type]
        remote_cache_staging="64MiB",  # type: ignore[arg-type]
        allowed_origins=["*"],  # type: ignore[arg-type]
        journal_actors="scheduler,tokenizer",  # type: ignore[arg-type]
    )
    assert made == Settings(
        model="/models/m",
        journal="/var/j",
        kv_cache_memory=str(1 << 30),
        remote_cache_staging=64 << 20,
        allowed_origins=("*",),
        journal_actors=("scheduler", "tokenizer"),
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("host", ["::", "127.0.0.1", "localhost", "a-b.example.", "x_y"], ["", "a..b", "a b", "[::1]", "-a"]),
        (
            "host",
            ["fe80::1%eth0", "a" * 63 + ".b"],
            ["a" * 64 + ".b", "300.1.1.1", "1.2.3", "http://x", "ü.de"],
        ),
        ("served_model_name", ["m", "a b", "m987654321", "名"], [" m", "m ", "a\rb", "m" * 257, "\u202e"]),
        ("api_key", ["k", "s3cr3t-~!"], ["a b", "ü", "k" * 1025, "\n"]),
        (
            "remote_cache",
            ["file:///a b", "redis://h", "unix:///s?db=1"],
            ["/dir", "x", "file:", "://b"],
        ),
        ("allowed_origins", [["*"], ["null"], ["http://a:8/"]], [["a"], ["http://a/b"], ["http:// a"]]),
        ("model", ["a" * 255, "a/b@r:Q4_0", "./dir", "模型"], ["a" * 256, "a/" + "ü" * 128, "a\n", ""]),
        ("chat_template", ["/a/" + "b" * 255], ["/a/" + "b" * 256 + "/c"]),
        ("port", [0, 65535], [70000]),
        ("block_size", [8, 128], [7, 0, 256]),
    ],
)
def test_texts_with_a_form(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        Settings(**({"model": "m"} | {name: value}))
    for value in bad:
        with pytest.raises(ConfigError, match=f"^{name}: "):
            Settings(**({"model": "m"} | {name: value}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"remote_cache": "file:///d", "enable_prefix_caching": False}, "remote_cache needs prefix caching"),
        ({"journal_redact": True}, "nothing is recorded"),
        ({"journal": "d", "journal_key_file": "k"}, "nothing is redacted"),
        ({"journal": "d", "journal_max_bytes": "100MiB"}, "must hold 2 segments"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM("m", **settings)
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=said):
        read_settings("ksana serve", "Serve.", ["m", "--config", str(file)], {})


@pytest.mark.parametrize("annotation", [int, str, float, tuple[str, ...], dict[str, int], list[str]])
def test_a_setting_that_does_not_say_what_it_may_be_cannot_be_added(annotation: Any) -> None:
    struct = msgspec.defstruct("Made", [("added", annotation)])
    with pytest.raises(TypeError, match="the setting added"):
        settings_fields(struct, groups=GROUPS, byte_sizes=BYTE_FIELDS)


def test_the_actors_that_may_be_recorded_are_those_with_a_state() -> None:
    assert BY_NAME["journal_actors"].expected.partition("each one of ")[2].split(", ") == [
        "tokenizer",
        *(name for name in STATE_TYPES if name != "tokenizer"),
    ]

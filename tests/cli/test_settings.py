"""Where settings come from, which source wins, and what is said about values that will not do."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from ksana.cli.settings import (
    FIELDS,
    MAX_FILE_BYTES,
    build_parser,
    merge,
    parse_flags,
    read_environment,
    read_file,
    read_settings,
)
from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.setting_fields import nearest


def read(*argv: str, environ: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    config = [] if file is None else ["--config", str(file)]
    return read_settings("ksana serve", "Serve.", [*argv, *config], environ or {})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_struct() -> None:
    assert read("m") == Settings(model="m")


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "model: f\nport: 1\nmax_num_seqs: 1\nblock_size: 8\n")
    environ = {"KSANA_PORT": "2", "KSANA_MAX_NUM_SEQS": "2"}
    settings = read("--port", "3", environ=environ, file=file)
    assert settings == Settings(model="f", port=3, max_num_seqs=2, block_size=8)


SAMPLES = {
    "int": ("1", 1),
    "text": ("some", "some"),
    "bool": ("false", False),
    "remote_cache": ("file:///some", "file:///some"),
    "journal_actors": ("scheduler, tokenizer", ("scheduler", "tokenizer")),
    "allowed_origins": ("http://a,https://b:8", ("http://a", "https://b:8")),
}
"""A text and what it means, by name or kind; choices and sizes come from the field."""

COMPANIONS = {
    "journal_key_file": {"journal": "some", "journal_redact": True},
    "journal_actors": {"journal": "some"},
    "journal_segment_bytes": {"journal_max_bytes": 4 << 30},
}
"""What must be set as well for a setting to mean something."""


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_has_its_flag_variable_and_key(field, tmp_path: Path) -> None:
    if field.kind == "choice":
        text, value = str(field.choices[-1]), field.choices[-1]
    elif field.kind == "bytes":
        text, value = "2GiB", 2 << 30 if field.base is int else "2GiB"
    elif field.name == "api_key_file":
        (tmp_path / "key").write_text("k")
        text = value = str(tmp_path / "key")
    else:
        text, value = SAMPLES.get(field.name) or SAMPLES[field.kind]
    companions = COMPANIONS.get(field.name, {})
    wanted = msgspec.structs.replace(Settings(model="m"), **companions, **{field.name: value})
    model = [] if field.name == "model" else ["m"]
    for name, companion in companions.items():
        model.append("--" + name.replace("_", "-") + ("" if companion is True else f"={companion}"))
    flags = ["--no-" + field.flag[2:]] if field.kind == "bool" else [field.flag, text]
    assert read(*model, *flags) == wanted
    assert read(*model, environ={field.variable: text}) == wanted
    in_file = list(value) if isinstance(value, tuple) else value
    assert read(*model, file=write(tmp_path, yaml.safe_dump({field.name: in_file}))) == wanted


@pytest.mark.parametrize(("flag", "value"), [("--plan-ahead", True), ("--no-plan-ahead", False)])
def test_switches_win_over_the_variable_both_ways(flag: str, value: bool) -> None:
    assert read("m", flag, environ={"KSANA_PLAN_AHEAD": str(not value)}).plan_ahead is value


def test_the_last_of_a_repeated_flag_wins_and_equals_signs_work() -> None:
    assert read("m", "--port=1", "--port", "2").port == 2
    assert read("--port=1", "m").model == "m"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "x"], "--port: 'x' will not do; it must be a whole number from 0 to 65535"),
        (["--port", "70000"], "--port: '70000' will not do; it must be a whole number from 0 to 65535"),
        (["--port", "-1"], "'-1' will not do"),
        (["--max-model-len", "0"], "it must be a whole number from 1 to 1073741824"),
        (["--block-size", "17"], "it must be one of 8, 16, 32, 64, 128"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' will not do; it must be a size in bytes"),
        (["--max-body-bytes", "0"], "--max-body-bytes: '0' will not do"),
        (["--max-modellen", "5"], r"unknown flag --max-modellen \(did you mean --max-model-len\?\)"),
        (["--max_model_len=5"], r"unknown flag --max_model_len \(did you mean --max-model-len\?\)"),
        (["--zzz"], "unknown flag --zzz; see ksana serve --help"),
        (["--max-model", "5"], "unknown flag --max-model"),  # no abbreviations
        (["--port"], "--port: expected one argument"),
        (["n"], "unexpected argument 'n'"),
        (["--model", "n"], "named twice"),
    ],
)
def test_what_is_said_of_wrong_flags(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read("m", *argv)


def test_no_model() -> None:
    with pytest.raises(ConfigError, match="no model was given"):
        read()


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("KSANA_MAX_MODEL_LEN", "many", "KSANA_MAX_MODEL_LEN: 'many' will not do"),
        (
            "KSANA_MODEL_LEN",
            "5",
            r"KSANA_MODEL_LEN is set, but is no setting \(did you mean KSANA_MAX_MODEL_LEN",
        ),
        ("KSANA_", "5", "KSANA_ is set"),
        ("KSANA_PLAN_AHEAD", "maybe", "true or false"),
        ("KSANA_API_KEY", "", "KSANA_API_KEY is set, but empty"),
    ],
)
def test_what_is_said_of_wrong_variables(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read("m", environ={variable: text})


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    environ = {"PORT": "x", "KSANA_TEST_STRICT": "1", "KSANA_PORT": "", "ksana_port": "9"}
    assert read_environment(environ) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", r"no setting is called 'prot' \(did you mean port\?\)"),
        ("max-model-len: 1", r"did you mean max_model_len\?"),
        ("5: 1", "no setting is called 5"),
        ("port: '1'", "port in .*settings.yaml: '1' will not do"),
        ("port: true", "True will not do"),
        ("kv_cache_memory: [1]", "it must be a size"),
        ("kv_cache_memory: true", "it must be a size"),
        ("allowed_origins: 5", "a list of texts"),
        ("allowed_origins: {a: b}", "a list of texts"),
        ("- port", "not one list"),
        ("port", "not one text"),
        ("port: 1\nport: 2", "'port' stands twice"),
        ("{[]: 1}", "not YAML as expected"),
        ("port: [", "not YAML as expected"),
        ("port: !!python/object/apply:os.getcwd []", "not YAML as expected"),
        ("[" * 5000, "not YAML as expected"),
        ("\0", "not YAML as expected"),
        ("# " + "x" * MAX_FILE_BYTES, "is larger than"),
    ],
)
def test_what_is_said_of_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read("m", file=write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: No such file"):
        read("m", file=tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read("m", file=tmp_path)
    assert read_file(write(tmp_path, "# nothing\n")) == {}


def test_a_size_in_a_file_may_be_a_number(tmp_path: Path) -> None:
    assert read("m", file=write(tmp_path, "kv_cache_memory: 4096")).kv_cache_memory == "4096"
    assert read("m", file=write(tmp_path, "kv_cache_memory: null")).kv_cache_memory is None


def test_a_bomb_of_aliases_is_refused_and_not_printed(tmp_path: Path) -> None:
    levels = [f"- &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="port in") as error:
        read("m", file=write(tmp_path, "\n".join(["port:", "- &a0 [x]", *levels])))
    assert len(str(error.value)) < 400


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read("m", file=write(tmp_path, "api_key: [hush]"))
    assert "hush" not in str(error.value)
    assert "api_key in" in str(error.value)


def test_a_value_that_loses_is_checked_all_the_same(tmp_path: Path) -> None:
    file = write(tmp_path, "port: abc")
    with pytest.raises(ConfigError, match=r"port in .*: 'abc' will not do"):
        read("m", "--port", "1", file=file)
    with pytest.raises(ConfigError, match=r"port in .*: 'abc' will not do"):
        read("m", environ={"KSANA_PORT": "2"}, file=file)
    with pytest.raises(ConfigError, match="KSANA_PORT: 'x' will not do"):
        read("m", "--port", "1", environ={"KSANA_PORT": "x"})
    with pytest.raises(ConfigError, match="--port: 'x' will not do"):
        read("m", "--port", "x", "--port", "1")
    with pytest.raises(ConfigError, match="KSANA_PLAN_AHEAD"):
        read("m", "--plan-ahead", environ={"KSANA_PLAN_AHEAD": "maybe"})


@pytest.mark.parametrize("text", ["'*'", "['*']", "- '*'", "' * ,'"])
def test_origins_in_a_file_are_written_as_in_a_flag_or_as_a_list(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, f"allowed_origins:\n  {text}\n")
    assert (
        read("m", file=file).allowed_origins == ("*",) == read("m", "--allowed-origins", "*").allowed_origins
    )


def test_help_shows_every_setting_once_with_its_default_and_no_secret() -> None:
    text = build_parser("ksana serve", "Serve.").format_help()
    for field in FIELDS:
        assert len(re.findall(rf"^  {field.flag}[ ,]", text, re.MULTILINE)) == 1, field.flag
        assert field.description, f"{field.name} has no description"
    assert "(default: 8000)" in text
    assert "(default: None)" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_nearest() -> None:
    assert nearest("--prot", ["--port", "--host"]) == " (did you mean --port?)"
    assert nearest("--xyzzy", ["--port", "--host"]) == ""


def test_layers_are_what_merge_wants() -> None:
    flags, file = parse_flags("ksana serve", "", ["m", "--config", "x.yaml"])
    assert file == Path("x.yaml")
    assert merge([flags]) == Settings(model="m")

"""Reading the settings: command line, then environment, then file, then default; the first that speaks wins.

    ksana serve smollm2-135m --max-model-len 4096
    KSANA_MAX_MODEL_LEN=4096
    max_model_len: 4096          # in the file that --config names (YAML)

Flags, keys and KSANA_ variables that no setting has are errors, never ignored, and so is every value that
does not fit, also one that another source overrides: it would come to light on the day the other is dropped.
The text says where the value came from. Secrets do not appear in errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from ksana.config import FIELDS, NOT_SETTINGS, Settings, format_bytes, read_api_keys
from ksana.errors import ConfigError
from ksana.input_file import read_input
from ksana.setting_fields import VARIABLE_PREFIX, Field, nearest

MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True)
class Given:
    """A value that a source gave, and how an error names that source."""

    value: object
    source: str
    is_text: bool
    """From a flag or variable, where everything is text and `8000` may mean a number."""


Layer = Mapping[str, Given]
"""What one source gave, by field name."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors (one line, exit code 2) like all others."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _wide)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; ConfigError with the nearest flag for one that is not known."""
        arguments, unknown = self.parse_known_args(argv)
        for text in unknown:
            if text.startswith("-") and text != "-":
                flag = text.partition("=")[0]
                known = [option for action in self._actions for option in action.option_strings]
                self.error(f"unknown flag {flag}{nearest(flag, known)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0][:80]!r}")
        return arguments


def read_settings(prog: str, description: str, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of a command that takes all of them. Raises ConfigError; `--help` exits the process."""
    flags, file = parse_flags(prog, description, argv)
    return merge([flags, read_environment(environ), {} if file is None else read_file(file)])


def parse_flags(prog: str, description: str, argv: Sequence[str]) -> tuple[Layer, Path | None]:
    """What the command line gives, and the file it names with --config."""
    arguments = vars(build_parser(prog, description).parse_strictly(argv))
    config = arguments.pop("config", None)
    return flags_layer(arguments), None if config is None else Path(config)


def flags_layer(arguments: dict[str, Any]) -> Layer:
    """What the flags of `add_settings` give; `arguments` are those that were parsed."""
    positional = arguments.pop("MODEL", None)
    if positional is not None:
        if "model" in arguments:
            raise ConfigError(
                f"the model is named twice: {positional!r} and --model {arguments['model'][-1]!r}"
            )
        arguments["model"] = [positional]
    layer = {}
    for field in FIELDS:
        values = arguments.get(field.name, [])
        # Of a repeated flag the last wins, but all are checked.
        for value in [values] if isinstance(values, bool) else values:
            layer[field.name] = Given(value, field.flag, is_text=True)
            check_value(field, layer[field.name])
    return layer


def build_parser(prog: str, description: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} MODEL [--config FILE] [settings]",
        description=description,
        epilog=(
            "Each setting is also a variable (--max-model-len is KSANA_MAX_MODEL_LEN) and a key of the file "
            "(max_model_len: 4096). A flag wins over a variable, a variable over the file."
        ),
    )
    parser.add_argument("--config", metavar="FILE", help="Settings from a YAML file")
    add_settings(parser)
    return parser


def add_settings(parser: Parser, leave_out: frozenset[str] = frozenset()) -> None:
    """The model as a positional argument, and a flag for each setting but those of these names."""
    parser.add_argument("MODEL", nargs="?", help=_help(FIELDS[0]))
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in FIELDS:
        if field.name in leave_out:
            continue
        group = groups.get(field.group)
        if group is None:
            group = groups[field.group] = parser.add_argument_group(field.group)
        _add_flag(group, field)


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    text = "Same as MODEL" if field.name == "model" else _help(field)
    if field.kind == "bool":
        group.add_argument(
            field.flag,
            dest=field.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        group.add_argument(
            field.flag,
            dest=field.name,
            action="append",
            metavar=field.metavar,
            default=argparse.SUPPRESS,
            help=text,
        )


def _help(field: Field) -> str:
    """The flag's line in --help. argparse formats it with %, so a % of ours is doubled."""
    text = field.description
    if field.kind == "bool":
        text += f" (default: {'yes' if field.default else 'no'})"
    elif field.kind == "bytes" and isinstance(field.default, int):
        text += f" (default: {format_bytes(field.default)})"
    elif field.default not in (None, (), msgspec.NODEFAULT):
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=34, width=110)


def read_environment(environ: Mapping[str, str]) -> Layer:
    """What the KSANA_ variables give. An empty one counts as not set, but an empty secret is an error:
    who sets a key wants one asked for."""
    by_variable = {field.variable: field for field in FIELDS}
    layer = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in NOT_SETTINGS:
            continue
        field = by_variable.get(variable)
        if field is None:
            raise ConfigError(
                f"{variable} is set, but is no setting{nearest(variable, by_variable)}; unset it"
            )
        if text == "" and field.secret:
            raise ConfigError(f"{variable} is set, but empty; unset it or give it a value")
        if text != "":
            layer[field.name] = Given(text, variable, is_text=True)
    return layer


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error instead of the last one winning.

    So is a merge (`<<`): a few that merge each other stand for more keys than memory holds.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem="merging with << is not allowed here", problem_mark=key_node.start_mark
                )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> Layer:
    """What a YAML file gives. Raises ConfigError for a file that cannot be read or has other keys."""
    raw = read_input(path, MAX_FILE_BYTES, f"settings file {path}")
    try:
        content = yaml.load(raw, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"settings file {path} is not YAML as expected: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"settings file {path} must hold lines such as `port: 8000`, not one {_kind(content)}"
        )
    names = [field.name for field in FIELDS]
    for key in content:
        if key not in names:
            raise ConfigError(f"settings file {path}: no setting is called {key!r}{nearest(str(key), names)}")
    return {key: Given(value, f"{key} in {path}", is_text=False) for key, value in content.items()}


def merge(layers: Sequence[Layer]) -> Settings:
    """The settings: each field from the first layer that has it, else its default. All layers are checked."""
    values = {}
    for field in FIELDS:
        checked = [check_value(field, layer[field.name]) for layer in layers if field.name in layer]
        if checked:
            values[field.name] = checked[0]
        elif field.default is msgspec.NODEFAULT:
            raise ConfigError(
                f"no {field.name} was given: name it as the first argument (for example smollm2-135m), "
                f"in {field.variable}, or as {field.name} in the settings file"
            )
    settings = Settings(**values)
    read_api_keys(settings)
    return settings


def check_value(field: Field, given: Given) -> Any:
    """The value as the field wants it, or a ConfigError that names source, value and what is expected."""
    return field.check(given.value, given.source, is_text=given.is_text)


def _kind(value: object) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, "value")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

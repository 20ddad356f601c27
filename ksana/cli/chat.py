"""`ksana chat`: talk to a running server in the terminal."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

from ksana.cli.conversation import Chunk, Conversation, error_text, printable, read_chunks
from ksana.cli.settings import Parser
from ksana.config import Settings, read_api_keys
from ksana.errors import ConfigError, ServiceError

MAX_ERROR_BYTES = 64 << 10
HELP = "/reset forgets what was said, /exit ends (so does Ctrl-D), Ctrl-C stops an answer."


def run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_strictly(argv)
    url = _base_url(arguments)
    headers = {"Authorization": f"Bearer {key}"} if (key := _api_key(arguments.api_key_file)) else {}
    # A proxy has no business between a terminal and a server on the same machine.
    is_local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    timeout = httpx.Timeout(None, connect=5.0)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=not is_local) as client:
        model = arguments.model or _served_model(client)
        conversation = Conversation(
            model=model,
            system=arguments.system,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
        )
        _converse(client, conversation, model)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="ksana chat",
        description=f"Talk to a running server. {HELP}",
        epilog="The API key, if the server wants one, comes from KSANA_API_KEY or --api-key-file.",
    )
    parser.add_argument("--url", help="Address of the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--port", type=int, help="Port of a server on this machine, instead of --url")
    parser.add_argument("--model", help="Model to ask for (default: the one that is served)")
    parser.add_argument("--system", metavar="TEXT", help="System message: how the model is to behave")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.5,
        help="How freely it chooses; 0 always takes the likeliest token (default: 0.5)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer")
    parser.add_argument("--seed", type=int, metavar="N", help="Make answers repeatable")
    parser.add_argument("--api-key-file", metavar="FILE", help="File whose first line is the API key")
    return parser


def _base_url(arguments: argparse.Namespace) -> str:
    if arguments.url is not None and arguments.port is not None:
        raise ConfigError("--url and --port exclude each other")
    if arguments.url is None:
        variable = os.environ.get("KSANA_PORT") or 8000
        name, port = ("KSANA_PORT", variable) if arguments.port is None else ("--port", arguments.port)
        url, wrong = f"http://127.0.0.1:{port}", f"{name}: {str(port)[:80]!r} is no port"
    else:
        url = str(arguments.url).rstrip("/").removesuffix("/v1")
        wrong = f"--url: {url[:80]!r} is no address such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets without an end, or a port that is no number up to 65535
        is_address = False
    if not is_address:
        raise ConfigError(wrong)
    return url


def _api_key(file: str | None) -> str | None:
    key = None if file is not None else os.environ.get("KSANA_API_KEY") or None
    keys = read_api_keys(Settings(model="any", api_key=key, api_key_file=file))
    return keys[0] if keys else None


def _served_model(client: httpx.Client) -> str:
    """The name of the first model that the server lists."""
    try:
        response = client.get("/v1/models", timeout=10.0)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from None
    if response.status_code != 200:
        raise _refused(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServiceError(f"what answers at {client.base_url} is no OpenAI-compatible server") from None


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> ServiceError:
    return ServiceError(
        f"no server answers at {str(client.base_url).rstrip('/')} ({error or type(error).__name__}). "
        "Start one in another terminal with `ksana serve smollm2-135m`, or name its address with --url"
    )


def _refused(status: int, body: bytes) -> ServiceError:
    hint = "; set KSANA_API_KEY or use --api-key-file" if status == 401 else ""
    return ServiceError(printable(error_text(status, body)) + hint, status=status)


def _converse(client: httpx.Client, conversation: Conversation, model: str) -> None:
    """Questions and answers until the user ends it."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _enable_line_editing()
        print(f"Talking to {printable(model)}. {HELP}")
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        if question == "/exit":
            return
        if question == "/reset":
            conversation.reset()
            print("Forgotten.")
        elif question == "/help":
            print(HELP)
        elif question.startswith("/"):
            print(f"There is no {printable(question.split()[0])}. {HELP}")
        elif question:
            _ask(client, conversation, question, is_terminal)


def _ask(client: httpx.Client, conversation: Conversation, question: str, is_terminal: bool) -> None:
    """One question: print the answer as it comes, and remember both.

    Errors of a single question do not end the conversation in a terminal; elsewhere they do, so that a
    script notices.
    """
    answer: list[str] = []
    started = time.monotonic()
    last = Chunk()
    try:
        with client.stream("POST", "/v1/chat/completions", json=conversation.request(question)) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, next(response.iter_bytes(MAX_ERROR_BYTES), b""))
            for chunk in read_chunks(response.iter_lines()):
                answer.append(chunk.text)
                print(printable(chunk.text), end="", flush=True)
                last = chunk if chunk.usage or not last.usage else last
        print(_summary(last, time.monotonic() - started) if is_terminal else "")
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print("\n[stopped]")
    except (httpx.HTTPError, ServiceError) as error:
        failure = error if isinstance(error, ServiceError) else _unreachable(client, error)
        if answer:
            print()
        if not is_terminal:
            raise failure from None
        print(f"[{failure}]")
    if any(answer):
        conversation.add(question, "".join(answer))


def _summary(last: Chunk, duration_s: float) -> str:
    if last.usage is None or duration_s <= 0:
        return "\n"
    num_tokens = last.usage.completion_tokens
    return f"\n[{num_tokens} tokens, {num_tokens / duration_s:.1f} tokens/s]\n"


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where Python was built with readline."""
    try:
        importlib.import_module("readline")
    except ImportError:
        return

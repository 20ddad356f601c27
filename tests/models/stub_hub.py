"""A Hugging Face hub on loopback that serves repositories from memory: what its client asks, no more."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Repositories = dict[str, dict[str, bytes]]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED, TOKEN = "org/gated", "hf_letmein"


class StubHub:
    """`address` is for HF_ENDPOINT; `requests` are "METHOD /path" in the order they came."""

    def __init__(self, repositories: Repositories) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *_args: object) -> None:
                pass

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        status, body, headers = self._respond(path, request.headers.get("Authorization"))
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    def _respond(self, path: str, authorization: str | None) -> tuple[int, bytes, dict[str, str]]:
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repositories:
            return _failure(404, "RepoNotFound", "Repository not found")
        if repo == GATED and authorization != f"Bearer {TOKEN}":
            return _failure(403, "GatedRepo", "Access to this model is restricted")
        files = self.repositories[repo]
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v2", COMMIT):
            return _failure(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if is_api:
            return self._api(repo, files, rest)
        name = "/".join(rest[2:])
        if name not in files:
            return _failure(404, "EntryNotFound", f"Entry not found: {name}")
        etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
        return 200, files[name], {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}

    def _api(self, repo: str, files: dict[str, bytes], rest: list[str]) -> tuple[int, bytes, dict[str, str]]:
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
        info = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": name} for name in files],
        }
        return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}


def _failure(status: int, code: str, message: str) -> tuple[int, bytes, dict[str, str]]:
    headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
    return status, json.dumps({"error": message}).encode(), headers


@contextmanager
def stub_hub(repositories: Repositories) -> Iterator[StubHub]:
    """Serve until the block ends."""
    hub = StubHub(repositories)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()

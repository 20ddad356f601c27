"""Models from the hub: its own client against a stub on loopback, in a process of its own per case.

A process each, because the client reads its environment variables when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksana.models.load import open_checkpoint
from tests.models.stub_hub import COMMIT, GATED, TOKEN, StubHub, stub_hub
from tests.models_for_tests import tiny_llama_dir, tiny_llama_gguf


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubHub]:
    made = tmp_path_factory.mktemp("made")
    directory = tiny_llama_dir(made)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    gguf = tiny_llama_gguf(made).read_bytes()
    stray = {"original/consolidated.00.pth": b"pickle", "pytorch_model.bin": b"pickle", "README.md": b"#"}
    ggufs = dict.fromkeys(("t.Q4_K_M.gguf", "t.Q4_K_S.gguf", "t-Q8_0.gguf", "sub/t-q4_0.gguf"), gguf)
    repositories = {
        "org/tiny": files | stray | {"adapter.safetensors": b"not a model"},
        GATED: files,
        "org/ggufs": ggufs | {"t-Q8_0-v2.gguf": gguf, "README.md": b"#"},
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
        "org/text": {"README.md": b"#"},
    }
    with stub_hub(repositories) as served:
        yield served


PROGRAM = """
import sys
from ksana.errors import ModelLoadError
from ksana.models.sources import resolve_model
try:
    print(resolve_model(*sys.argv[1:]))
except ModelLoadError as error:
    print(f"ModelLoadError: {error}")
assert "torch" not in sys.modules
"""


def resolve(home: Path, hub: StubHub, *arguments: str, **environment: str) -> str:
    """What resolve_model gives, or its error, in a process with its own hub cache under `home`."""
    variables = {
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PATH": os.environ["PATH"],
    } | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_directory_is_fetched_once_and_without_strays(tmp_path: Path, hub: StubHub) -> None:
    path = Path(resolve(tmp_path, hub, "org/tiny"))
    assert path == tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert open_checkpoint(path).spec.num_layers == 3
    assert open_checkpoint(path).spec.name == "org/tiny"

    hub.requests.clear()
    assert resolve(tmp_path, hub, "org/tiny") == str(path)
    assert not [request for request in hub.requests if request.startswith("GET /org/tiny")]

    hub.requests.clear()
    assert resolve(tmp_path, hub, "org/tiny", HF_HUB_OFFLINE="1") == str(path)
    assert hub.requests == []
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert resolve(tmp_path, hub, "org/tiny", **nowhere) == str(path)


def test_revisions(tmp_path: Path, hub: StubHub) -> None:
    assert resolve(tmp_path, hub, "org/tiny@v2").endswith(COMMIT)
    assert "GET /api/models/org/tiny/revision/v2" in " ".join(hub.requests)
    assert resolve(tmp_path, hub, "org/tiny", "v2").endswith(COMMIT)
    assert "org/tiny@v9: there is no such revision" in resolve(tmp_path, hub, "org/tiny@v9")
    assert "names revision 'v2', but 'main' is given too" in resolve(tmp_path, hub, "org/tiny@v2", "main")


def test_gguf_by_quantization(tmp_path: Path, hub: StubHub) -> None:
    path = Path(resolve(tmp_path, hub, "org/ggufs:Q4_K_M"))
    assert path.name == "t.Q4_K_M.gguf"
    assert open_checkpoint(path).spec.num_layers == 3
    assert resolve(tmp_path, hub, "org/ggufs@main:Q4_0").endswith(f"{COMMIT}/sub/t-q4_0.gguf")
    assert resolve(tmp_path, hub, "org/ggufs:q4_k_m", HF_HUB_OFFLINE="1") == str(path)
    refused = "org/ggufs has 2 GGUF files for Q8_0: t-Q8_0-v2.gguf, t-Q8_0.gguf"
    assert refused in resolve(tmp_path, hub, "org/ggufs:Q8_0")
    missing = resolve(tmp_path, hub, "org/ggufs:Q5_K_M")
    assert "org/ggufs has no GGUF file for Q5_K_M, but: sub/t-q4_0.gguf, t-Q8_0-v2.gguf" in missing
    assert "org/tiny has no GGUF files at all" in resolve(tmp_path, hub, "org/tiny:Q4_K_M")


def test_what_cannot_be_fetched_is_explained(tmp_path: Path, hub: StubHub) -> None:
    assert "org/absent: no such repository on the hub" in resolve(tmp_path, hub, "org/absent")
    assert "only pickled weights" in resolve(tmp_path, hub, "org/pickled")
    assert "org/text has no model.safetensors: it has README.md" in resolve(tmp_path, hub, "org/text")
    assert "its GGUF files are asked for as org/name:QUANT" in resolve(tmp_path, hub, "org/ggufs")
    offline = resolve(tmp_path, hub, "org/tiny", HF_HUB_OFFLINE="1")
    assert "org/tiny: the hub cannot be reached and its cache does not hold it" in offline


def test_tokens_are_used(tmp_path: Path, hub: StubHub) -> None:
    assert f"{GATED}: access has to be granted on the hub first" in resolve(tmp_path, hub, GATED)
    assert resolve(tmp_path, hub, GATED, HF_TOKEN=TOKEN).endswith(COMMIT)

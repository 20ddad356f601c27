"""What `make` finds out before anything long begins: scripts/preflight.sh with made-up surroundings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "preflight.sh"
TOOLS = ("sh", "awk", "head", "uname")


class Machine:
    """A directory to run in and a PATH with only what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = next(Path(d) / tool for d in ("/bin", "/usr/bin") if (Path(d) / tool).exists())
            (self.bin / tool).symlink_to(found)
        self.program("df", 'echo header; echo "/dev/x 9 9 50000 9% /"')

    def program(self, name: str, shell: str) -> None:
        path = self.root / name if "/" in name else self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{shell}\n")
        path.chmod(0o755)

    def real_python(self, name: str) -> None:
        self.program(name, f'exec {sys.executable} "$@"')

    def run(self, what: str, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["/bin/sh", str(SCRIPT), what],
            cwd=self.root,
            env={"PATH": str(self.bin), **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.count("\n") <= 3, done.stderr
        return done


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_python_is_the_first_that_will_do(machine: Machine) -> None:
    machine.program("python3", 'test "$1" = --version && echo "Python 3.9.1" || exit 1')
    done = machine.run("python")
    assert done.returncode == 2
    assert "no Python 3.11 to 3.13 is on the PATH (Python 3.9.1)" in done.stderr
    machine.program("python3.12", "exit 0")
    assert machine.run("python").stdout == "python3.12\n"


def test_a_python_that_was_asked_for_is_not_replaced(machine: Machine) -> None:
    machine.program("python3", "exit 0")
    machine.program("python2", 'test "$1" = --version && echo "Python 2.7" || exit 1')
    assert machine.run("python", PYTHON="python3").stdout == "python3\n"
    done = machine.run("venv", PYTHON="python2")
    assert (done.returncode, done.stderr) == (
        2,
        "ksana: python2 is Python 2.7; Ksana needs Python 3.11 to 3.13\n",
    )
    assert "there is no pypy;" in machine.run("venv", PYTHON="pypy").stderr


def test_no_venv_module(machine: Machine) -> None:
    machine.program("python3", 'case "$2" in *ensurepip*) exit 1;; *print*) echo python3.11-venv;; esac')
    done = machine.run("venv")
    assert done.returncode == 2
    assert "apt-get install python3.11-venv" in done.stderr


def test_a_python_that_was_asked_for_is_looked_at_also_when_there_is_a_venv(machine: Machine) -> None:
    def version(name: str, prefix: str) -> None:
        machine.program(name, f'case "$2" in *base_prefix*) echo "{prefix} 3.12.1";; esac')

    version(".venv/bin/python", "/opt/one")
    version("one", "/opt/one")
    version("two", "/opt/two")
    assert machine.run("asked-python").stderr == ""
    assert machine.run("asked-python", PYTHON="one").stderr == ""
    done = machine.run("asked-python", PYTHON="two")
    assert done.returncode == 0
    assert "PYTHON=two is not used" in done.stderr
    assert "/opt/one 3.12.1" in done.stderr
    assert "make clean" in done.stderr
    done = machine.run("asked-python", PYTHON="/bin/nopy")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no /bin/nopy" in done.stderr


def test_make_looks_at_it(machine: Machine) -> None:
    """Whether `.venv` is there and installed or not; nothing is installed here."""
    for stamp in ("made", "installed", "installed-test"):
        (machine.root / ".venv").mkdir(exist_ok=True)
        (machine.root / ".venv" / stamp).touch()
    (machine.root / "pyproject.toml").touch()
    for stamp in ("made", "installed", "installed-test"):
        (machine.root / ".venv" / stamp).touch()
    (machine.root / "scripts").symlink_to(SCRIPT.parent)
    for target in (".venv/installed", ".venv/installed-test"):
        make = ["make", "-f", str(SCRIPT.parent.parent / "Makefile"), "--no-print-directory", target]
        done = subprocess.run(
            [*make, "PYTHON=/bin/nopy"], cwd=machine.root, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "there is no /bin/nopy" in done.stderr
        assert subprocess.run(make, cwd=machine.root, capture_output=True, check=False).returncode == 0


def test_no_room(machine: Machine) -> None:
    machine.program("python3", "exit 0")
    assert machine.run("venv").returncode == 0
    machine.program("df", 'echo header; echo "/dev/x 9 9 3000 9% /"')
    done = machine.run("venv")
    assert done.returncode == 2
    assert "only 3000 MB are free on this disk" in done.stderr


def test_a_broken_venv(machine: Machine) -> None:
    (machine.root / ".venv").mkdir()
    for what in ("venv", "serve"):
        machine.program("gcc", "")
        done = machine.run(what)
        assert done.returncode == 2
        assert "make clean" in done.stderr


def test_no_compiler(machine: Machine) -> None:
    machine.real_python("python3")
    done = machine.run("serve", PORT="0")
    assert done.returncode == 2
    assert "apt-get install gcc" in done.stderr
    machine.program("mycc", "")
    assert machine.run("serve", PORT="0", CC="mycc").returncode == 0


@pytest.mark.parametrize("variable", ["PORT", "KSANA_PORT"])
def test_ports(machine: Machine, variable: str) -> None:
    machine.real_python("python3")
    machine.program("gcc", "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = machine.run("serve", **{variable: port})
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in done.stderr
    assert machine.run("serve", **{variable: port}).returncode == 0
    assert "is no port" in machine.run("serve", **{variable: "x"}).stderr


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="only Linux's PyTorch comes with CUDA")
@pytest.mark.parametrize(
    ("versions", "is_told"),
    [
        ("2.15.0, 2.14.1, 2.13.1, 2.13.0, 2.9.1", True),
        ("2.14.1, 2.13.0+cpu, 2.13.0", False),
        ("2.14.1, 2.13.1, 2.13.0+cpu", True),
        ("2.14.1, 2.9.0", False),
    ],
)
def test_a_torch_with_cuda_for_nothing_is_told(machine: Machine, versions: str, is_told: bool) -> None:
    python = (
        f'case "$*" in *import*) exit 1;; *) echo "torch (9)"; echo "Available versions: {versions}";; esac'
    )
    machine.program(".venv/bin/python", python)
    done = machine.run("torch")
    assert done.returncode == 0
    assert ("TORCH_INDEX=https://" in done.stderr) == is_told
    assert machine.run("torch", TORCH_INDEX="https://example.invalid").stderr == ""
    if is_told:
        machine.program("df", 'echo header; echo "/dev/x 9 9 9000 9% /"')
        assert machine.run("torch").returncode == 2
    machine.program("nvidia-smi", "")
    assert machine.run("torch").stderr == ""

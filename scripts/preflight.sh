#!/bin/sh
# Finds out what would fail later, before anything long begins. One clear line for each thing that is missing.
#
#   preflight.sh python     print the Python to make .venv with
#   preflight.sh serve      can the server run? (compiler, port)
#   preflight.sh venv       can .venv be made? (Python, venv module, disk)
#   preflight.sh asked-python   will PYTHON do, and was .venv made with it?
#   preflight.sh torch      in a new .venv: say so if pip would take a PyTorch with CUDA for a machine without GPU
#
# Reads PYTHON, PORT and TORCH_INDEX (see Makefile), and KSANA_PORT and KSANA_HOST as `ksana serve` does.
set -eu

VENV=.venv
TORCH_SERIES=2.13. # as in pyproject.toml
CPU_INDEX_HINT="TORCH_INDEX=https://download.pytorch.org/whl/cpu"
DISK_MB=3072
DISK_CUDA_MB=10240

fail() {
    echo "ksana: $*" >&2
    exit 2
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "there is no $PYTHON; give PYTHON= a Python 3.11 to 3.13"
        is_supported "$PYTHON" || fail "$PYTHON is $("$PYTHON" --version 2>&1 | head -n 1); Ksana needs Python 3.11 to 3.13"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 is on the PATH ($(python3 --version 2>/dev/null || echo "there is no python3")); install one, or name it: PYTHON=/path/to/python3.12"
}

# A Python by where it is installed and its version: the same for it and for a .venv made with it.
identity() {
    "$1" -c 'import sys; print(sys.base_prefix, "%d.%d.%d" % sys.version_info[:3])'
}

check_asked_python() {
    [ -n "${PYTHON:-}" ] || return 0
    find_python >/dev/null
    [ -x "$VENV/bin/python" ] || return 0
    used=$(identity "$VENV/bin/python" 2>/dev/null) || return 0 # a broken .venv is told of elsewhere
    asked=$(identity "$PYTHON")
    [ "$used" = "$asked" ] ||
        echo "ksana: PYTHON=$PYTHON is not used: $VENV was made with another ($used); to make it anew: make clean" >&2
}

check_venv_module() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 cannot make virtual environments; on Debian and Ubuntu: apt-get install $("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
}

check_existing_venv() {
    is_supported "$VENV/bin/python" ||
        fail "$VENV does not hold a working Python 3.11 to 3.13; remove it with: make clean"
}

check_disk() {
    free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
    [ "$free_mb" -ge "$1" ] || fail "only $free_mb MB are free on this disk; the installation needs $1 MB"
}

check_compiler() {
    command -v "${CC:-gcc}" >/dev/null 2>&1 ||
        fail "there is no C compiler (${CC:-gcc}), and the kernels are compiled at the first start; on Debian and Ubuntu: apt-get install gcc libc6-dev"
}

# On Linux the PyTorch of PyPI comes with CUDA, several gigabytes. pip prefers a version with the suffix +cpu
# where it is offered one: in the index that TORCH_INDEX names, or among wheels on this machine.
check_torch() {
    [ "$(uname -s)" = Linux ] || return 0
    [ -z "${TORCH_INDEX:-}" ] && ! command -v nvidia-smi >/dev/null 2>&1 || return 0
    "$VENV/bin/python" -c 'import torch' 2>/dev/null && return 0
    best=$("$VENV/bin/python" -m pip index versions torch 2>/dev/null |
        awk -v series="$TORCH_SERIES" '/^Available versions:/ {
            for (i = 3; i <= NF; i++) if (index($i, series) == 1) { sub(",", "", $i); print $i; exit }
        }')
    case "$best" in
    "" | *+cpu) return 0 ;; # nothing known (no network?), or the right one
    esac
    echo "ksana: pip is about to take PyTorch $best with CUDA (several GB), and no GPU was found here." >&2
    echo "ksana: the CPU build is far smaller: stop this with Ctrl-C, and call make with $CPU_INDEX_HINT" >&2
    check_disk "$DISK_CUDA_MB"
}

check_venv() {
    if [ -e "$VENV" ]; then
        check_existing_venv
        "$VENV/bin/python" -c 'import torch' 2>/dev/null || check_disk "$DISK_MB"
    else
        python=$(find_python)
        check_venv_module "$python"
        check_disk "$DISK_MB"
    fi
}

check_port() {
    port=${PORT:-${KSANA_PORT:-8000}}
    "$1" - "${KSANA_HOST:-127.0.0.1}" "$port" <<'PYTHON' || exit 2
import os, socket, sys
host, port = sys.argv[1:]
if not (port.isascii() and port.isdigit() and int(port) <= 65535):
    sys.exit(f"ksana: PORT={port} is no port; give a number from 0 to 65535")
try:
    socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
except OSError as error:
    sys.exit(f"ksana: cannot listen on {host}:{port} ({os.strerror(error.errno)}); choose another port: make serve PORT=8001")
PYTHON
}

case "${1:-}" in
python)
    find_python
    ;;
venv)
    check_venv
    ;;
asked-python)
    check_asked_python
    ;;
torch)
    check_torch
    ;;
serve)
    check_compiler
    if [ -e "$VENV" ]; then
        check_existing_venv
        check_port "$VENV/bin/python"
    else
        python=$(find_python)
        check_port "$python"
    fi
    ;;
*)
    fail "usage: preflight.sh python|serve|venv|asked-python|torch"
    ;;
esac

#!/usr/bin/env bash
# Makes .venv, or reuses it, with this project and the tested versions of all that it needs.
# Installs only when something changed that it depends on. PYTHON names the interpreter to use, if not the first found.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python python3.11 python3.12 python3.13}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer among: ${PYTHON:-python3 python python3.11 python3.12 python3.13}." >&2
    echo "       Install one, or name it: PYTHON=/path/to/python3.11 bash launch/test.sh" >&2
    return 1
}

# What the environment was made from; the path too, since an editable install points to it.
wanted() {
    "$root/.venv/bin/python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [sys.version.encode(), str(root).encode()]
parts += [(root / name).read_bytes() for name in ("pyproject.toml", "configs/constraints.txt", "launch/setup.sh")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
}

stamp=.venv/made-from
if ! is_new_enough .venv/bin/python; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
if [[ ! -f $stamp || $(<"$stamp") != "$(wanted)" ]]; then
    echo "setup: installing the project and the tested versions of what it needs"
    rm -f "$stamp"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint configs/constraints.txt --editable '.[demo,docs,test,dev]'
    # torch for GPUs brings this version of it. Here kernels run in its interpreter, which needs nothing else.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint configs/constraints.txt --no-deps triton ||
        echo "setup: no Triton here: tests of kernels will be skipped"
    # The simulation of Azure's blobs, a program of Node.
    if command -v npm >/dev/null; then
        timeout 180 npm install --silent --no-audit --no-fund --prefix out/azurite azurite@3.35.0 >/dev/null ||
            echo "setup: no Azurite here: tests of az:// will be skipped"
    fi
    wanted >"$stamp"
fi
.venv/bin/python -m tests.standin.build # a simulated accelerator, for tests
echo "setup: .venv is ready"

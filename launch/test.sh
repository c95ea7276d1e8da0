#!/usr/bin/env bash
# Sets up, lints, type-checks and tests everything. Arguments go to pytest:
#   bash launch/test.sh --exhaustive          also what takes minutes
#   bash launch/test.sh tests/unit -k layers  only some tests
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
python=.venv/bin/python

# Some environments keep Python from writing bytecode: then each of the hundreds of processes that tests start would
# compile shardopt again.
unset PYTHONDONTWRITEBYTECODE

# trio, which selenium needs, would be imported with hypothesis by each worker: a third of a second.
export HYPOTHESIS_NO_PLUGINS=1

echo "test: ruff"
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
# Beside the tests, which leave a core idle now and then. One of them waits for this lock to use mypy's cache.
mkdir -p out
flock --no-fork pyproject.toml "$python" -m mypy >out/mypy.txt 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT
command -v chromedriver >/dev/null ||
    echo "test: no browser here: reports are not tested in one (apt-get install --yes chromium chromium-driver)"
echo "test: pytest"
# One worker more than there are cores: tests of ranks also wait.
status=0
"$python" -m pytest -n "$(($(nproc) + 1))" --dist worksteal --durations=10 "$@" || status=$?
echo "test: mypy"
wait "$mypy" || status=$?
cat out/mypy.txt
exit "$status"

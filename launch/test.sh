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

# Compiles the tests, on the core that mypy leaves free.
"$python" -m pytest --collect-only --quiet >/dev/null 2>&1 &
echo "test: ruff"
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
echo "test: mypy"
"$python" -m mypy
wait
command -v chromedriver >/dev/null ||
    echo "test: no browser here: reports are not tested in one (apt-get install --yes chromium chromium-driver)"
echo "test: pytest"
# One worker more than there are cores: tests of ranks also wait.
exec "$python" -m pytest -n "$(($(nproc) + 1))" --dist worksteal --durations=10 "$@"

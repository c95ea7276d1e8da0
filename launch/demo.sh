#!/usr/bin/env bash
# Sets up, trains, kills a rank, resumes on fewer ranks, compares, and draws out/loss.png. Fails where a loss differs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
exec .venv/bin/python examples/kill_and_resume.py "$@"

#!/usr/bin/env bash
# Sets up, compares cuts of tables of 2 million rows, trains, kills a rank, resumes on three under another plan,
# compares, and draws out/demo_tables.png. Fails where a loss differs. PYTHON names an interpreter that has all that is
# needed, in the place of .venv's.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${PYTHON:-} ]] || bash launch/setup.sh
exec "${PYTHON:-$PWD/.venv/bin/python}" examples/kill_and_replan.py "$@"

#!/usr/bin/env bash
# Sets up, trains and serves at once, kills a rank of each, checks all samples, and draws out/demo_stream.png. Fails
# where a sample is not of exactly one published step, where the reward has not risen, or where a job did not go on.
# PYTHON names an interpreter that has all that is needed, in the place of .venv's.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${PYTHON:-} ]] || bash launch/setup.sh
exec "${PYTHON:-$PWD/.venv/bin/python}" examples/kill_in_stream.py "$@"

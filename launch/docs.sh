#!/usr/bin/env bash
# Sets up, and builds the documentation's site into out/site. With --serve it is served on http://127.0.0.1:8000, and
# built again when a page changes.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export NO_MKDOCS_2_WARNING=1 # of the theme, about a version that configs/constraints.txt does not have
if [[ ${1:-} == --serve ]]; then
    shift
    exec .venv/bin/python -m mkdocs serve --config-file configs/mkdocs.yml "$@"
fi
exec .venv/bin/python -m mkdocs build --strict --config-file configs/mkdocs.yml "$@"

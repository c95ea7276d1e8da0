#!/usr/bin/env bash
# Sets up, installs the tested versions of the frameworks in a folder of their own, and runs all tests of integrations,
# the programs of their pages included.
# Arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
folder=out/integrations
if ! cmp --silent configs/integrations.txt "$folder/made-from"; then
    echo "test_integrations: installing the frameworks"
    rm -rf "$folder"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$folder" --requirement configs/integrations.txt
    cp configs/integrations.txt "$folder/made-from"
fi
export PYTHONPATH="$PWD:$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python -m pytest tests/integrations tests/docs/test_blocks.py -k "integrations or torchtitan or lora" --exhaustive "$@"

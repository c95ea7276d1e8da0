#!/usr/bin/env bash
# Sets up, installs the tested versions of the frameworks in a folder of their own, and runs all tests of integrations,
# the programs of their pages included; and all other tests that need a package from there.
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
others=(
    tests/families
    tests/unit/checkpoint/converting/test_convert_transformers.py
    tests/unit/data/test_random_state.py
    tests/distributed/test_traceable.py
)
exec .venv/bin/python -m pytest tests/integrations tests/docs/test_blocks.py "${others[@]}" --exhaustive \
    -k "integrations or torchtitan or lora or families or transformers or stateful_data_loader or torchao or streams_into" "$@"

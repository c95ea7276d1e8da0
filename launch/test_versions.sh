#!/usr/bin/env bash
# Runs the tests on the versions of torch that are followed: the oldest, that with which all else is tested, and the newest
# that can be had; one environment after the other. Each takes gigabytes, so CI does not run it. Arguments go to pytest.
#   bash launch/test_versions.sh
#   TORCH="2.14.0 newest" bash launch/test_versions.sh                                     others
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash launch/test_versions.sh          from another index, as for CPUs
# Environments are kept under out/versions, and made again when something changed that they depend on; "newest" each time.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh # for its Python
index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
failed=()
for version in ${TORCH:-2.11.0 2.13.0 newest}; do
    folder=out/versions/$version
    wanted=$(cat pyproject.toml configs/constraints.txt launch/test_versions.sh | sha256sum)
    if [[ $version == newest || ! -f $folder/made-from || $(<"$folder/made-from") != "$wanted" ]]; then
        echo "test_versions: making the environment of torch $version"
        rm -rf "$folder"
        .venv/bin/python -m venv "$folder"
        # All else in the tested versions, so that what fails is torch's doing; but for what torch alone needs.
        grep -vE '^(torch|triton|setuptools|sympy|mpmath|networkx)==' configs/constraints.txt >"$folder/constraints.txt"
        torch="torch==$version"
        [[ $version == newest ]] && torch="torch>=2.13.0rc1" # by which pip takes one that is not released yet
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${index[@]}" \
            --constraint "$folder/constraints.txt" "$torch" --editable '.[demo,docs,test,dev]'
        echo "$wanted" >"$folder/made-from"
    fi
    echo "test_versions: torch $("$folder/bin/python" -c 'import torch; print(torch.__version__)')"
    "$folder/bin/python" -m tests.standin.build
    "$folder/bin/python" -m pytest -n 2 --durations=10 "$@" || failed+=("$version")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "test_versions: failed on torch ${failed[*]}" >&2
    exit 1
fi
echo "test_versions: passed on all"

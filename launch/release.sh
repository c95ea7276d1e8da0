#!/usr/bin/env bash
# Makes a release of the commit that is checked out: tests it, builds the documentation, the sdist and the wheel, tries the
# wheel in an empty environment of each promised Python, and tags. Nothing is pushed or uploaded.
#   bash launch/release.sh
#   bash launch/release.sh --dry-run                    no tag; lists what a release would be refused for, and goes on
#   bash launch/release.sh --dry-run --without-tests    no tests and no documentation either
#   PYTHONS="3.11 3.12" bash launch/release.sh --dry-run                                   tries only these; or "none"
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash launch/release.sh                torch from another index
# The promised versions of Python are those in pyproject.toml. One that is not there can be found by pyenv too. What is
# built is in out/release/dist. A dry run exits with 1 if a release would be refused.
set -Eeuo pipefail
trap 'echo "release: failed at line $LINENO: $BASH_COMMAND; logs are in out/release" >&2' ERR
umask 022 # modes of files are part of the archives

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD dry='' tests=1
for argument; do
    case $argument in
        --dry-run) dry=1 ;;
        --without-tests) tests='' ;;
        *) echo "release: found $argument; required --dry-run, --without-tests or nothing" >&2; exit 2 ;;
    esac
done
if [[ -z $dry && (-z $tests || -n ${PYTHONS:-}) ]]; then
    echo "release: --without-tests and PYTHONS need --dry-run: a release tests everything" >&2
    exit 2
fi

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' shardopt/version.py)
promised=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)

find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1."*/bin/python; do
        if [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

refuse() { problems+=("$1: found $2; required $3; $4"); }

problems=() pythons=()
changed=$(git status --porcelain | wc -l)
((changed == 0)) || refuse "the tree" "$changed files that git status lists" "none" "commit or remove them"
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
    refuse shardopt/version.py "'$version'" "three numbers, such as 0.1.0" "write the version of the release"
grep -qE "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
    refuse CHANGELOG.md "no dated section of $version" "'## [$version] - YYYY-MM-DD'" "name and date [Unreleased]"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
    refuse "the tag v$version" "$(git rev-parse --short "v$version")" "none" "raise the version: a tag never moves"
for each in $promised; do
    if python=$(find_python "$each"); then
        [[ " ${PYTHONS:-$promised} " != *[[:space:]]"$each"[[:space:]]* ]] || pythons+=("$python")
    else
        refuse "Python $each" "none on this machine" "each version in pyproject.toml" "install it: pyenv install $each"
    fi
done

say_problems() {
    ((${#problems[@]})) || return 0
    echo "release: $version is refused:"
    printf '  - %s\n' "${problems[@]}"
} >&2
say_problems
((${#problems[@]} == 0)) || [[ -n $dry ]] || exit 1

if [[ -n $tests ]]; then
    bash launch/test.sh
    bash launch/docs.sh
fi

# From the commit alone, with its time. sdists of setuptools have the time of the build, so they are packed again.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
unset PYTHONPATH # the installed package, never this folder
rm -rf out/release
mkdir -p out/release
"${pythons[0]:-python3}" -m venv out/release/builder
out/release/builder/bin/python -m pip install --quiet build

build_into() {
    local folder=$root/out/release/$1
    mkdir -p "$folder"/{source,dist}
    git archive HEAD | tar -x -C "$folder/source"
    PIP_CONSTRAINT=$root/configs/constraints.txt out/release/builder/bin/python -m build \
        --outdir "$folder/dist" "$folder/source" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; return 1; }
    mkdir "$folder/unpacked"
    tar -xzf "$folder/dist/shardopt-$version.tar.gz" -C "$folder/unpacked"
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
        --mode=u=rwX,go=rX -C "$folder/unpacked" -c "shardopt-$version" | gzip -n9 >"$folder/dist/shardopt-$version.tar.gz"
}

build_into first
build_into second
for each in out/release/first/dist/*; do
    cmp "$each" "out/release/second/dist/${each##*/}"
done
mv out/release/first/dist out/release/dist
rm -rf out/release/{first,second,builder}
echo "release: built twice with the same bytes"
(cd out/release/dist && sha256sum ./*)

# The program of the README and the template, as their pages say, from the wheel.
try_on() {
    local folder=out/release/on-$1 bin=$root/out/release/on-$1/env/bin
    echo "release: trying the wheel on Python $1"
    "$2" -m venv "$folder/env"
    export PIP_FIND_LINKS="$root/out/release/dist ${PIP_FIND_LINKS:-}" PIP_CONSTRAINT=$root/configs/constraints.txt
    export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=$bin:$PATH OMP_NUM_THREADS=1
    [[ -z ${TORCH_INDEX:-} ]] || export PIP_EXTRA_INDEX_URL=$TORCH_INDEX
    pip install out/release/dist/*.whl
    awk '/^```python$/ { inside = 1; next } /^```$/ && inside { exit } inside' README.md >"$folder/train.py"
    cd "$folder"
    [[ $(python -c 'import shardopt; print(shardopt.__file__)') == "$root/out/release/on-$1/env/"* ]]
    [[ $(shardopt --version) == "shardopt $version" ]]
    torchrun --standalone --nproc-per-node 4 train.py 150 >readme.log 2>&1 </dev/null
    torchrun --standalone --nproc-per-node 2 train.py 200 >>readme.log 2>&1 </dev/null
    grep -q "resumed step 150 from .*, saved by 4 ranks" readme.log
    shardopt new my-run >/dev/null
    cd my-run
    pip install -r requirements.txt
    torchrun --standalone --nproc-per-node 2 train.py config.toml >my-run.log 2>&1 </dev/null
    sed -i 's/^steps = 200$/steps = 250/' config.toml
    torchrun --standalone --nproc-per-node 3 train.py config.toml --resume >>my-run.log 2>&1 </dev/null
    grep -q "resumed step 200 from .*, saved by 2 ranks" my-run.log && grep -q "^step 250 loss" my-run.log
    python -m pytest --quiet --config-file /dev/null --rootdir . tests </dev/null # and not by this project's options
}

for python in "${pythons[@]}"; do
    each=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    (try_on "$each" "$python")
    rm -rf "out/release/on-$each/env" # gigabytes
done

say_problems
((${#problems[@]} == 0)) || exit 1
if [[ -z $dry ]]; then
    git tag --annotate --message "shardopt $version" "v$version"
    echo "release: tagged v$version; push it, and upload out/release/dist"
fi

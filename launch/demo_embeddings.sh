#!/usr/bin/env bash
# Sets up, trains vectors of words on 4 ranks, resumes half of such a run on 3, and fails where a loss differs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
python=.venv/bin/python
runs=out/demo-embeddings
rm -rf "$runs"
export OMP_NUM_THREADS=1

# Arguments: the number of ranks, where the run is, and settings.
train() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" \
        examples/train_embeddings.py configs/embeddings.toml --resume --out "$runs/$2" "${@:3}"
}

echo "1/4  Train on 4 ranks, each of which holds a quarter of the rows."
train 4 uninterrupted
echo "2/4  The same again, but only the first half."
train 4 resumed --set steps=150
echo "3/4  Resume on 3 ranks: rows and optimizer state are cut again."
train 3 resumed
echo "4/4  Compare with the uninterrupted run."
"$python" examples/compare_runs.py "$runs/uninterrupted" "$runs/resumed" --tolerance 1e-5

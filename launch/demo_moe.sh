#!/usr/bin/env bash
# Sets up, trains a mixture of experts on 8 ranks (2 stages × 2 ranks for experts × 2 parts of the batch), stops it and
# resumes under other splits of 4 and 2 ranks, and fails where a loss differs from that of one rank which has it all.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
python=.venv/bin/python
runs=out/demo-moe
rm -rf "$runs"
mkdir -p "$runs"
export OMP_NUM_THREADS=1
job=
trap '[[ -z $job ]] || kill "$job" 2>/dev/null || true' EXIT

fail() {
    tail -n 60 "$1" >&2
    exit 1
}

# Arguments: the number of ranks, where the run is, stages, ranks for experts, and the step after which it gets SIGTERM.
train() {
    local run="$runs/$2" log="$runs/$2-$1.log"
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" examples/train_moe.py configs/moe.toml \
        --resume --out "$run" --set "split.pipeline=$3" "split.experts=$4" >"$log" 2>&1 &
    job=$!
    if [[ -n ${5-} ]]; then
        until grep -qs "\"step\": $5," "$run/loss.jsonl"; do
            kill -0 "$job" 2>/dev/null || fail "$log"
            sleep 0.1
        done
        kill -TERM "$job"    # torchrun passes it on, and ends with an error; the ranks save the same step, and exit
        wait "$job" || true
    else
        wait "$job" || fail "$log"
    fi
    job=
    grep -h "resumed step\|stop requested" "$log" | sed 's/^/     /' || true
    echo "     $(tail -n 1 "$run/loss.jsonl")"
}

echo "1/5  Train on one rank, which holds everything."
train 1 uninterrupted 1 1
echo "2/5  Train on 8 ranks: 2 stages of a pipeline, and in each the experts of a layer on 2 ranks; then SIGTERM."
train 8 resumed 2 2 12
echo "3/5  Resume on 4 ranks: 4 stages; then SIGTERM."
train 4 resumed 4 1 24
echo "4/5  Resume on 2 ranks: no stages, the experts on both."
train 2 resumed 1 2
echo "5/5  Compare with the run on one rank."
"$python" examples/compare_runs.py "$runs/uninterrupted" "$runs/resumed" --tolerance 1e-5

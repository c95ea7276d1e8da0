#!/usr/bin/env bash
# Installs Slurm from Debian's packages, and tests launch/slurm.sbatch on two nodes that are both this machine.
# Needs root. Takes some ten minutes on two cores.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
fi
exec .venv/bin/python -m pytest -v --exhaustive -m exhaustive --timeout 1200 tests/launch/test_slurm.py "$@"

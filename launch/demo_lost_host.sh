#!/usr/bin/env bash
# Sets up, trains on 4 hosts, which are namespaces of this machine, cuts one off and wipes it in the middle of a save,
# resumes with 3, compares, and draws out/lost_host.png. Fails where a loss differs. Linux with iproute2; as root, or
# where users may make namespaces. PYTHON names an interpreter that has all that is needed, in the place of .venv's.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
namespaces=(unshare --fork --kill-child --pid --mount-proc --net --mount) # with the first process all others end
((EUID == 0)) || namespaces+=(--user --map-root-user)
command -v ip >/dev/null || { echo "demo_lost_host: there is no ip here: install iproute2" >&2; exit 2; }
# All that the demo needs: a device, a host of its own, and memory there.
try='ip link add bridge type bridge && unshare --net --mount mount -t tmpfs none /dev/shm'
if ! said=$("${namespaces[@]}" sh -c "$try" 2>&1); then
    echo "demo_lost_host: hosts are made of namespaces, which this machine does not let you make: $said" >&2
    echo "demo_lost_host: run it as root (in a container: one with CAP_SYS_ADMIN and CAP_NET_ADMIN), or, as a user," >&2
    echo "demo_lost_host: with sysctl user.max_user_namespaces above 0 and no rule of AppArmor against it." >&2
    exit 2
fi
[[ -n ${PYTHON:-} ]] || bash launch/setup.sh
exec "${namespaces[@]}" "${PYTHON:-$PWD/.venv/bin/python}" examples/lose_a_host.py "$@"

#!/usr/bin/env bash
# Trains on several hosts over ssh: torchrun on each, a host that is lost is left behind and taken back.
#
#   HOSTS="node1 node2 node3 node4" NODES=2:4 RANKS_PER_NODE=8 bash launch/multi_host.sh examples/train_lm.py configs/lm.toml --resume
#
# To be started once, on any machine from which the hosts are reached, in the project's folder, which all hosts see under
# the same path, like the checkpoints. By hand, or from a scheduler of your own: the same on every host, with its name:
#
#   HOSTS=… NODES=… RANKS_PER_NODE=… bash launch/multi_host.sh --here node2 examples/train_lm.py configs/lm.toml --resume
#
# The program is one whose Manager has `stop_on=signal.SIGTERM`, with `seconds` of its Preemption below 30: torchrun grants the ranks
# that much when a host comes back, saves included.
#
#   HOSTS            what the transport calls each, or name=address where other hosts reach it by another address; the
#                    first holds the rendezvous
#   NODES            with how many the job runs, "2:4" for at least 2 and at most 4; all of them if not given
#   RANKS_PER_NODE   1 if not given
#   MAX_RESTARTS     how often ranks that fail are started again; a host that is lost is such a failure (100)
#   JOB              a name, which no other job on these hosts has (train)
#   MASTER_PORT      of the first host, where hosts meet (29400)
#   LOGS             a folder that all hosts see: torchrun's output by host, and one log per rank and start (out/logs/JOB)
#   TRANSPORT        the command that runs `bash -s` on a host, given its name ("ssh" with deadlines)
#   RENDEZVOUS       other settings of torchrun's rendezvous, as for its --rdzv-conf
#   SHUTDOWN_SECONDS which ranks have to save and exit when the job is asked to stop (60)
#   RETRY_SECONDS    after which a host that was lost is tried again (10)
#   PASS             names of variables that ranks get too, beside those that begin with NCCL_, GLOO_ and OMP_
#
# Ctrl-C, or SIGTERM, has all ranks save and exit. The job ends with what the torchrun of the first host ends with; that
# of another host is started again while the first one runs.
set -uo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
fail() { echo "multi_host: $*" >&2; exit 2; }

here=
if [[ ${1:-} == --here ]]; then
    here=${2:-}
    shift 2 || fail "--here wants the name of this host"
fi
case ${1:-} in
"") fail "which program? HOSTS=\"a b\" bash launch/multi_host.sh program.py …" ;;
-h | --help) usage; exit 0 ;;
esac

read -r -a hosts <<<"${HOSTS:-}"
((${#hosts[@]})) || fail "which hosts? HOSTS=\"a b\""
export HOSTS NODES=${NODES:-${#hosts[@]}} RANKS_PER_NODE=${RANKS_PER_NODE:-1} MAX_RESTARTS=${MAX_RESTARTS:-100}
export JOB=${JOB:-train} MASTER_PORT=${MASTER_PORT:-29400} RENDEZVOUS=${RENDEZVOUS:-join_timeout=3600}
export LOGS=${LOGS:-$PWD/out/logs/$JOB} SHUTDOWN_SECONDS=${SHUTDOWN_SECONDS:-60} PYTHON=${PYTHON:-} PASS=${PASS:-}
RETRY_SECONDS=${RETRY_SECONDS:-10}
transport=${TRANSPORT:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3}
names=("${hosts[@]%%=*}")
first=${hosts[0]#*=}
mkdir -p "$LOGS"

# The torchrun of this host, in the place of this shell.
run_here() {
    local host address= python=$PYTHON pid end
    for host in "${hosts[@]}"; do
        [[ ${host%%=*} == "$here" ]] && address=${host#*=}
    done
    [[ -n $address ]] || fail "$here is none of HOSTS: $HOSTS"
    if [[ -z $python ]]; then
        python=python3
        [[ -x .venv/bin/python ]] && python=.venv/bin/python
    fi
    # One of an earlier start, to which the connection was lost: its ranks have what these need.
    pid=$(cat "$LOGS/$here.pid" 2>/dev/null)
    end=$((SECONDS + SHUTDOWN_SECONDS + 15))
    is_running "$pid" && kill -TERM "$pid" # once: see stop_on
    while is_running "$pid"; do
        ((SECONDS < end)) || kill -KILL "$pid"
        sleep 1
    done
    rm -f "$LOGS/$here.told"
    echo $$ >"$LOGS/$here.pid"
    # Not of its own: where torchrun gives a job that starts again the store of the previous start, gloo and NCCL may
    # find the addresses of processes that are gone there.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SHUTDOWN_SECONDS
    exec "$python" launch/elastic.py --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" \
        --max-restarts "$MAX_RESTARTS" --monitor-interval 1 --local-addr "$address" \
        --rdzv-endpoint "$first:$MASTER_PORT" --rdzv-id "$JOB" \
        --rdzv-conf "is_host=$([[ $address == "$first" ]] && echo 1 || echo 0),$RENDEZVOUS" \
        --log-dir "$LOGS/$here" --redirects 3 "$@" </dev/null >>"$LOGS/$here.log" 2>&1
}

# Whether a process is a torchrun of this job.
is_running() { [[ -n $1 ]] && tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" | grep -q -F -- "--rdzv-id $JOB "; }

if [[ -n $here ]]; then
    run_here "$@"
fi

settings=(HOSTS NODES RANKS_PER_NODE MAX_RESTARTS JOB MASTER_PORT RENDEZVOUS LOGS SHUTDOWN_SECONDS PYTHON PASS)
read -r -a others <<<"$PASS"
for name in "${others[@]}" $(compgen -e | grep -E '^(NCCL|GLOO|OMP)_'); do settings+=("$name"); done
state=$(mktemp -d)
over=$state/over # once it exists no host is started again
declare -A watchers=()

# Runs torchrun on a host, until the connection or torchrun ends. Away from the terminal, whose Ctrl-C is for this shell.
run_on() {
    local host=$1
    shift
    {
        printf 'cd %q || exit\n' "$PWD"
        for name in "${settings[@]}"; do [[ -v $name ]] && printf 'export %s=%q\n' "$name" "${!name}"; done
        printf 'exec bash launch/multi_host.sh --here %q' "$host"
        printf ' %q' "$@"
        echo
    } | setsid $transport "$host" bash -s
}

# Tells the torchrun of a host to stop, which has its ranks save and exit. Once: a third signal ends it before its ranks.
stop_on() {
    {
        printf 'pid=%q told=%q id=%q\n' "$LOGS/$1.pid" "$LOGS/$1.told" "--rdzv-id $JOB "
        # shellcheck disable=SC2016
        echo '[[ -e $told ]] || { pid=$(cat "$pid") && tr "\0" " " <"/proc/$pid/cmdline" | grep -q -F -- "$id" &&
            kill -TERM "$pid" && touch "$told"; }'
    } | timeout 20 setsid $transport "$1" bash -s 2>/dev/null
}

# A host's torchrun, started again for as long as the job runs, and this script ($$, as a subshell has it too).
watch() {
    local host=$1 starts=0 code
    trap : TERM INT
    while [[ ! -e $over ]] && kill -0 $$ 2>/dev/null; do
        run_on "$@"
        code=$?
        ((code == 0)) && return 0
        [[ -e $over ]] && return "$code"
        kill -0 $$ 2>/dev/null || return "$code"
        # That of the first host says how the job ends, unless it was itself lost: killed, or out of reach (ssh's 255).
        [[ $host == "${names[0]}" ]] && ((code < 128)) && return "$code"
        echo "multi_host: $host was lost (exit code $code), the $((++starts)). time; its log is $LOGS/$host.log" >&2
        sleep "$RETRY_SECONDS"
    done
}

stop_all() {
    touch "$over"
    local host stops=()
    for host in "$@"; do stop_on "$host" & stops+=($!); done
    wait "${stops[@]}"
}

# Once told to, asks hosts to stop, again every 5 seconds: where torchrun does not run yet, nobody hears of it.
pass_on() {
    [[ -n $told ]] && ((SECONDS >= next)) || return 0
    next=$((SECONDS + 5))
    [[ -e $over ]] || echo "multi_host: stop requested; forwarded to the ranks"
    stop_all "$@"
}

# Ends a watcher, and the connection that it waits for.
give_up() {
    # shellcheck disable=SC2046
    kill -TERM $(cat "/proc/$1/task/"*/children 2>/dev/null) 2>/dev/null
    kill -KILL "$1" 2>/dev/null
}

told= next=0
trap 'told=143 next=0' TERM
trap 'told=130 next=0' INT
for host in "${names[@]}"; do
    watch "$host" "$@" &
    watchers[$host]=$!
done
echo "multi_host: $NODES of ${names[*]}, $RANKS_PER_NODE ranks each; logs in $LOGS"
while kill -0 "${watchers[${names[0]}]}" 2>/dev/null; do
    pass_on "${names[@]}"
    sleep 1
done
wait "${watchers[${names[0]}]}"
code=$?

# The others end by themselves, at the barrier after which the first one has; those that are cut off, not at all.
touch "$over"
end=$((SECONDS + (code == 0 || ${told:-0} ? SHUTDOWN_SECONDS : 0)))
left=("${names[@]:1}")
while ((${#left[@]})); do
    still=()
    for host in "${left[@]}"; do kill -0 "${watchers[$host]}" 2>/dev/null && still+=("$host"); done
    left=("${still[@]}")
    pass_on "${left[@]}"
    if ((SECONDS >= end && ${#left[@]})); then
        stop_all "${left[@]}"
        sleep 5
        for host in "${left[@]}"; do
            echo "multi_host: $host is left behind: nothing is known of it" >&2
            give_up "${watchers[$host]}"
        done
        break
    fi
    sleep 0.5
done
rm -rf "$state"
echo "multi_host: the job ended with ${told:-$code}"
exit "${told:-$code}"

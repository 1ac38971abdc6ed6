"""One allocation with a fleet of its own, which trains one job: etcd and the rendezvous on its first node, an agent on
each. Its certificates are made when it starts, and are good for this fleet alone.

What has to outlast the allocation is in one directory. The same job of Slurm that is requeued, or another one with the
same directory, goes on with the job where it was.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from elastic.platforms.slurm.batch_options import BatchOptions

LEAD_S = 5
"""More than the grace: how long before the time limit Slurm tells the script."""

BODY = r"""
# The address of this node for the others, and two ports that no other job has.
address=${ELASTIC_ADDRESS:-$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}
port=$((20000 + SLURM_JOB_ID % 5000 * 2))

fail() { echo "elastic: $*" >&2; exit 3; }
for program in elastic etcd python3 srun scontrol scancel; do
  command -v "$program" > /dev/null || fail "$program is not in PATH on $SLURMD_NODENAME"
done
# Another etcd than the one beside elastic, if there is one: that may lose data when it is killed.
server=$(type -ap etcd | grep -vFx "$(dirname "$(command -v elastic)")/etcd" | head -n 1)
umask 077
mkdir -p "$dir" || exit
exec 9> "$dir/lock" || exit
flock -w 300 9 || fail "another allocation uses $dir; give another --dir"

# Certificates of this start; the authority's key is gone when they are made.
rm -rf "$dir/ca" "$dir/certs"
elastic certs init "$dir/ca" > /dev/null || fail "no certificates"
certificate() { elastic certs node "$1" --ca "$dir/ca" --out "$dir/certs/$2" --role "${@:3}" > /dev/null; }
certificate fleet services rendezvous --role etcd --address 127.0.0.1 || fail "no certificates"
# A name as an agent makes it of its node's: small letters, digits and inner hyphens.
plain() { local name; name=$(printf %s "${1,,}" | tr -c 'a-z0-9' - | sed 's/^-*//; s/-*$//'); echo "${name:-$2}"; }
certificate "$(plain "$(id -un)" operator)" operator operator || fail "no certificates"
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  certificate "$(plain "${node%%.*}" node)" "$node" agent || fail "no certificate for $node"
done
rm -rf "$dir/ca"

# Slurm signals every process. The rendezvous holds that back, as it has a parent that says when to stop; etcd stops.
# What is kept is started again until the script ends.
kept() {
  trap '' TERM USR1
  while [ -e "$own" ]; do ELASTIC_PARENT=$BASHPID "$@"; sleep 1; done
}
set -m
own=$(mktemp -d)
cd "$own" || fail "no temporary directory"
certs=$dir/certs/services
kept "${server:-etcd}" --name fleet --data-dir "$dir/etcd" \
  --listen-client-urls "https://127.0.0.1:$((port + 1))" --advertise-client-urls "https://127.0.0.1:$((port + 1))" \
  --listen-peer-urls unix://peer:1 --initial-advertise-peer-urls unix://peer:1 --initial-cluster fleet=unix://peer:1 \
  --client-cert-auth --trusted-ca-file "$certs/etcd-ca.pem" \
  --cert-file "$certs/etcd.pem" --key-file "$certs/etcd.pem" >> "$dir/etcd.log" 2>&1 9>&- &
etcd=$!
kept elastic rendezvous --etcd "127.0.0.1:$((port + 1))" --listen "$address:$port" --certs "$certs" \
  --dir "$dir/rendezvous" --allow-unsafe-etcd >> "$dir/rendezvous.log" 2>&1 9>&- &
rendezvous=$!
export ELASTIC_RENDEZVOUS=$address:$port ELASTIC_CERTS=$dir/certs/operator
echo "export ELASTIC_RENDEZVOUS=$ELASTIC_RENDEZVOUS ELASTIC_CERTS=$ELASTIC_CERTS"

# An agent on each node; one that is lost ends neither the step nor the job. Slurm leaves the others alone also if that
# node is the first one: then they put the job back into the queue.
# shellcheck disable=SC2016
node='
  first=$1 dir=$2
  trap : TERM USR1
  while sleep 30; do
    left=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %N) && [ -n "$left" ] || continue
    scontrol show hostnames "$left" | grep -qx "$first" || scontrol requeue "$SLURM_JOB_ID"
  done &
  elastic agent --certs "$dir/certs/$SLURMD_NODENAME" --jobs-dir "$dir/$SLURMD_NODENAME" "${@:3}"
  code=$?
  kill $! 2> /dev/null
  exit $code'
srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none \
  bash -c "$node" node "$SLURMD_NODENAME" "$dir" "${agent[@]}" 9>&- &
agents=$!

# The job goes on where an earlier allocation has left it: a job that is not over does so by itself.
begun=$SECONDS
until elastic jobs > /dev/null 2>&1; do
  [ $((SECONDS - begun)) -lt 300 ] || fail "no rendezvous; see $dir/rendezvous.log and $dir/etcd.log"
  sleep 1
done
over='import json, sys
sys.exit((sys.argv[1], "ended") not in [(job["job"], job["state"]) for job in json.load(sys.stdin)["jobs"]])'
if [ ! -s "$dir/job" ]; then
  elastic submit "$job" > "$dir/job.new" || exit
  mv "$dir/job.new" "$dir/job"
elif elastic jobs --json | python3 -c "$over" "$(cat "$dir/job")"; then
  elastic submit "$job" --resume "$(cat "$dir/job")" > "$dir/job.new" || exit
  mv "$dir/job.new" "$dir/job"
fi

# Before the time limit, and at a SIGTERM, the agents have their grace: the job stops after a step, with a checkpoint.
# Whoever waits for the job is no process that a signal to all may end.
(trap '' TERM USR1; exec elastic jobs --wait "$(cat "$dir/job")" 9>&-) &
waiter=$!
limit=
trap : TERM
trap 'limit=near; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1
patience=20
while kill -0 "$waiter" 2> /dev/null; do
  if ! kill -0 "$agents" 2> /dev/null && ((patience-- == 0)); then kill -KILL "$waiter"; fi
  sleep 1 & wait $!
done
wait "$waiter"
code=$?
[ $code -ne 0 ] || rm "$dir/job"
scancel --signal=TERM "$SLURM_JOB_ID.0" 2> /dev/null
for _ in {1..15}; do kill -0 "$agents" 2> /dev/null || break; sleep 1; done
rm -rf "$own"
kill -KILL -- "-$rendezvous" 2> /dev/null
kill -TERM -- "-$etcd" 2> /dev/null
# At the time limit, and where Slurm has preempted the job and it is over before its GraceTime.
if [ $code -ne 0 ] && { [ -n "$limit" ] || scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """job: the path of the job's file. anew: each job of Slurm has a directory of its own, below that of `batch`;
    otherwise it is that one, and what is there is gone on with."""

    batch: BatchOptions
    job: str
    anew: bool


def fleet_script(options: FleetOptions) -> str:
    """For sbatch."""
    batch = options.batch
    own = (f"--nodes={batch.nodes}", "--ntasks-per-node=1", "--no-kill", f"--signal=B:USR1@{batch.grace_s + LEAD_S}")
    values = [
        f"dir={shlex.quote(batch.directory)}{'/$SLURM_JOB_ID' if options.anew else ''}",
        f"job={shlex.quote(options.job)}",
        f"agent=({shlex.join(batch.agent_words())})",
    ]
    return "\n".join([*batch.lines(*own), *values, BODY])

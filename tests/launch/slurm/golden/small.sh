#!/bin/bash
#SBATCH --job-name=run
#SBATCH --comment=strop:0123456789abcdef
#SBATCH --time=00:15:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-gpu=1
set -u
home=/runs/run-1
trial=$home
job=$SLURM_JOB_ID
cd "$trial" || exit 76
number=$((0 + ${SLURM_RESTART_COUNT:-0}))
attempt=$SLURM_JOB_ID-$number
record=$trial/attempts/$attempt
mkdir -p "$record/exit" || exit 76
# Agents have folders of their own there, which the next agent of this user removes after a kill.
export TMPDIR="${SLURM_TMPDIR:-/tmp}"
mapfile -t nodes < <(for list in SLURM_JOB_NODELIST; do scontrol show hostnames "${!list}"; done)
# Names of nodes need not resolve; their addresses do.
address=$(scontrol show node -o "${nodes[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')

# Releases before 23 do not say it.
[ -n "${SLURM_JOB_END_TIME:-}" ] ||
  export SLURM_JOB_END_TIME="$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e | head -n 1)" +%s 2>/dev/null)"

began=$(date +%s); saw=
trap 'saw=SIGTERM' TERM
trap : CONT USR2 USR1  # the agents hear these themselves

# Between TERM and KILL; agents keep the last part of it for themselves.
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
# One agent on each node. What it is told about the node is worked out there.
on_node='export STROP_NODE=$(($1 + SLURM_PROCID)); shift; exec "$@"'
agent=(/env/bin/python -m strop.launch.node --trial "$trial" --job "$home/job" --attempt "$attempt"
  --number "$number" --node-variable STROP_NODE --num-nodes 1 --address "$address"
  --ray-port $((20000 + SLURM_JOB_ID % 10000))
  --grace 120 --term-grace "$((${kill_wait:-30} * 4 / 5))")
step=(srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none --label)
steps=(); contain=(); inside=(podman run 'two words'); here=("${inside[@]}")
"${step[@]}" "${contain[@]}" \
  bash -c "$on_node" node 0 "${inside[@]}" "${agent[@]}" --part main & steps+=($!)
# Agents end each other where one has ended. Not `wait` alone: it returns at each signal, as if all had ended.
for pid in "${steps[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
done

job_value() { scontrol show job -o "$job" | sed -n "s/.* $1=\([^ ]*\).*/\1/p" | head -n 1; }
# A life that was cut off decides nothing: neither about the next one, nor about the secrets that it needs.
conclude() {
  trap '' TERM  # also in what it starts
  "${here[@]}" /env/bin/python -m strop.launch.slurm.verdict --trial "$trial" --job "$home/job" \
    --attempt "$attempt" --number "$number" --began "$began" --signal="$saw" \
    --life="${SLURM_RESTART_COUNT:-0}" --newest-life="$(job_value Restarts)" "$@" "${nodes[@]}" | tail -n 1
}
# After the verdict: requeueing sends TERM at once, and KILL follows. The controller may just be starting again.
live_again() {
  trap '' TERM
  for wait_s in 5 10 20 40 0; do
    life=$(job_value Restarts)
    [ "${life:-${SLURM_RESTART_COUNT:-0}}" = "${SLURM_RESTART_COUNT:-0}" ] || return
    scontrol requeue "$job" && return
    sleep "$wait_s"
  done
  false
}
code=1; next=
read -r code next unfit < <(conclude)
case $next in
  again) live_again ;;
  elsewhere)
    # While it waits, the job itself can still be changed; where no node is left, it would wait for ever.
    excluded=$(job_value ExcNodeList); excluded=${excluded/#(null)/}
    excluded=${excluded:+$excluded,}$unfit
    if refusal=$(sed '/^#SBATCH --dependency/d' "$home/job/job.sh" |
      sbatch --test-only --exclude="$excluded" --chdir=/ --output=/dev/null 2>&1); then
      live_again && scontrol update jobid="$job" ExcNodeList="$excluded"
    else
      conclude --refusal="$refusal" >/dev/null
    fi ;;
esac
exit "${code:-1}"

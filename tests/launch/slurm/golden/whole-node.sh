#!/bin/bash
#SBATCH --job-name=run
#SBATCH --comment=strop:0123456789abcdef
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --reservation=course
#SBATCH --time=00:15:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --partition=gpu
#SBATCH --constraint='ib&h100'
#SBATCH --exclude=n7
#SBATCH --mem=900G
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --exclusive
#SBATCH --mail-type=END
module load cuda
set -u
home=/runs/run-1
trial=$home
job=$SLURM_JOB_ID
cd "$trial" || exit 76
number=$((0 + ${SLURM_RESTART_COUNT:-0}))
attempt=$SLURM_JOB_ID-$number
record=$trial/attempts/$attempt
mkdir -p "$record/exit" || exit 76
export TMPDIR="${SLURM_TMPDIR:-/tmp}/strop-$(id -u)-$SLURM_JOB_ID-$number-$RANDOM"
mapfile -t nodes < <(for list in SLURM_JOB_NODELIST; do scontrol show hostnames "${!list}"; done)
# Names of nodes need not resolve; their addresses do.
address=$(scontrol show node -o "${nodes[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')

# Releases before 23 do not say it.
[ -n "${SLURM_JOB_END_TIME:-}" ] ||
  export SLURM_JOB_END_TIME="$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e | head -n 1)" +%s 2>/dev/null)"

# The verdict: what all agents said, or null where the end came before they could.
began=$(date +%s); verdict=null; saw=
write_verdict() {
  printf '{"exit_code": %s, "signal": "%s", "started_at": %s, "ended_at": %s, "nodes": [%s], "number": %s}\n' \
    "$verdict" "$saw" "$began" "$(date +%s)" "$(printf ', "%s"' "${nodes[@]}" | cut -c 3-)" "$number" \
    >"$record/verdict.tmp" && mv "$record/verdict.tmp" "$record/verdict.json"
}
finish() {
  [ -e "$record/verdict.json" ] || write_verdict
  rm -rf -- "$TMPDIR"
}
trap finish EXIT
trap 'saw=SIGTERM' TERM
trap : CONT USR2 USR1  # the agents hear these themselves

# Between TERM and KILL; agents keep the last part of it for themselves.
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
# One agent on each node. What it is told about the node is worked out there.
on_node='mkdir -p -m 700 "$TMPDIR"; export STROP_NODE=$(($1 + SLURM_PROCID)); shift; exec "$@"'
agent=(/env/bin/python -m strop.launch.node --trial "$trial" --job "$home/job" --attempt "$attempt"
  --number "$number" --node-variable STROP_NODE --num-nodes 2 --address "$address"
  --grace 120 --term-grace "$((${kill_wait:-30} * 4 / 5))")
step=(srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none --label)
steps=(); contain=(); inside=()
"${step[@]}" "${contain[@]}" \
  bash -c "$on_node" node 0 "${inside[@]}" "${agent[@]}" --part main & steps+=($!)
# Agents end each other where one has ended. Not `wait` alone: it returns at each signal, as if all had ended.
for pid in "${steps[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
done

# Many codes as one: any other before 76, before 75, before 0; no code is a failure. srun would say the largest.
mild=0; bad=; refused=
for ((i = 0; i < 2; i++)); do
  code=$(cat "$record/exit/$i" 2>/dev/null)
  case $code in
    0 | 75) [ "$code" -gt "$mild" ] && mild=$code ;;
    76) mild=76; refused+=,${nodes[i]} ;;
    *) case $code in '' | *[!0-9]*) code=1 ;; esac
       if [ -z "$bad" ] || { [ "$bad" -ge 128 ] && [ "$code" -lt 128 ]; }; then bad=$code; fi ;;
  esac
done
verdict=${bad:-$mild}
write_verdict
timeout 20 srun --overlap rm -rf -- "$TMPDIR"

# After the verdict: requeueing sends TERM at once, and KILL follows. The controller may just be starting again.
live_again() {
  trap '' TERM
  for wait_s in 5 10 20 40 0; do
    # A node that was cut off must not end the life that has begun elsewhere meanwhile.
    restarts=$(scontrol show job -o "$job" | sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p' | head -n 1)
    [ -z "$restarts" ] || [ "$restarts" = "${SLURM_RESTART_COUNT:-0}" ] || return
    scontrol requeue "$job" && return
    sleep "$wait_s"
  done
  false
}
if [ "$verdict" = 75 ] && [ -z "$saw" ] && [ "$number" -lt 3 ]; then
  live_again && exit 75
elif [ "$verdict" = 76 ] && [ -z "$saw" ] && [ ! -e "$trial/excluded-nodes" ]; then
  # Once, without the nodes whose preflight failed. While it waits, the job itself can still be changed.
  echo "${refused#,}" >"$trial/excluded-nodes"
  live_again && scontrol update jobid="$job" ExcNodeList=n7,"${refused#,}" && exit 76
fi
[ -n "$saw" ] || rm -f -- "$home/job/secrets.json"
exit "$verdict"

#!/bin/bash
#SBATCH --job-name=run
#SBATCH --comment='strop:0123456789abcdef night run'
#SBATCH --time=00:15:00
#SBATCH --dependency=afterok:7
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --partition=gpu
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH hetjob
#SBATCH --comment='strop:0123456789abcdef night run'
#SBATCH --time=00:15:00
#SBATCH --dependency=afterok:7
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --partition=cpu
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --cpus-per-task=16
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
mapfile -t nodes < <(for list in SLURM_JOB_NODELIST_HET_GROUP_0 SLURM_JOB_NODELIST_HET_GROUP_1; do scontrol show hostnames "${!list}"; done)
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
  --number "$number" --node-variable STROP_NODE --num-nodes 3 --address "$address"
  --grace 120 --term-grace "$((${kill_wait:-30} * 4 / 5))")
step=(srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none --label)
steps=(); contain=(); inside=()
image=/images/strop.sif
mounts=("$home" "$TMPDIR")
for i in "${!mounts[@]}"; do [[ ${mounts[i]} == *:* ]] || mounts[i]=${mounts[i]}:${mounts[i]}; done
# How the image runs here: `contain` for srun, `inside` before the agent. --gpus shows it those of the node.
use_image() {
  local devices=()
  if srun --help | grep -q -e --container-image; then
    how=pyxis; local IFS=,
    contain=(--container-image="$image" --container-mounts="${mounts[*]}" --container-workdir="$trial")
  elif command -v podman >/dev/null; then
    how=podman; export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$TMPDIR}
    [ -z "${1:-}" ] || devices+=(--device=nvidia.com/gpu=all)
    [ "$(id -u)" = 0 ] || devices+=(--userns=keep-id)
    inside=(podman run --rm --network=host --ipc=host --workdir="$trial" "${mounts[@]/#/--volume=}"
      --env='SLURM*' --env='STROP_*' --env=TMPDIR --env=CUDA_VISIBLE_DEVICES "${devices[@]}" "$image")
  elif how=$(command -v apptainer || command -v singularity); then
    [ -z "${1:-}" ] || devices+=(--nv)
    inside=("$how" exec --pwd "$trial" "${mounts[@]/#/--bind=}" "${devices[@]}" "$image")
  else
    echo "no pyxis, podman, apptainer or singularity here to run $image with" >&2
    verdict=76; exit 76
  fi
  echo "image $image by $how"
}
use_image --gpus
"${step[@]}" "${contain[@]}" --het-group=0 \
  bash -c "$on_node" node 0 "${inside[@]}" "${agent[@]}" --part main & steps+=($!)
use_image
CUDA_VISIBLE_DEVICES= "${step[@]}" "${contain[@]}" --het-group=1 \
  bash -c "$on_node" node 1 "${inside[@]}" "${agent[@]}" --part cpu & steps+=($!)
# Agents end each other where one has ended. Not `wait` alone: it returns at each signal, as if all had ended.
for pid in "${steps[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
done

# Many codes as one: any other before 76, before 75, before 0; no code is a failure. srun would say the largest.
mild=0; bad=; refused=
for ((i = 0; i < 3; i++)); do
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
timeout 20 srun --het-group=0,1 --overlap rm -rf -- "$TMPDIR"

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
  live_again && scontrol update jobid="$job" ExcNodeList="${refused#,}" && exit 76
fi
[ -n "$saw" ] || rm -f -- "$home/job/secrets.json"
exit "$verdict"

#!/usr/bin/env bash
#SBATCH --job-name=lmm-r1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@900
# One RL stage on all GPUs of a SLURM job: Ray on every node, then a stage script on the first. From the top of the project:
#   STAGE=train_fre_text.sh sbatch --nodes 4 --time 12:00:00 examples/scripts/lmm_r1/slurm.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/slurm.sh
# Flags go to the stage, variables too (MODEL, DATA, OUTPUT, CONFIG, PYTHON). Fifteen minutes before the time is up the run
# gets SIGTERM, saves its step and ends; the same job, submitted again, goes on from there.
set -euo pipefail
: "${STAGE:=train_fre_text.sh}"
: "${DRY_RUN:=0}"
: "${RAY_PORT:=6379}"
: "${START_WAIT_S:=600}"
nodes=${SLURM_JOB_NUM_NODES:-1}
export NUM_GPUS=${SLURM_GPUS_ON_NODE:-8}
# SLURM runs a copy of this file that lies elsewhere.
scripts=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples/scripts/lmm_r1}
stage=${scripts:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}/$STAGE
flags=(
  --actor.num_nodes "$nodes" --critic.num_nodes "$nodes" --ref.num_nodes "$nodes"
  --vllm.num_engines "$((nodes * NUM_GPUS))" "$@"
)
[[ $DRY_RUN == 0 ]] || exec bash "$stage" "${flags[@]}"

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(srun --overlap --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address)
export RAY_ADDRESS=$address:$RAY_PORT REWARD_HOST=$address
# Keys of Ray and the reward service, which srun hands on: without, everyone in the network could run code.
: "${RAY_AUTH_TOKEN:=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}" "${REMOTE_RM_TOKEN:=$RAY_AUTH_TOKEN}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN REMOTE_RM_TOKEN
export RAY_process_group_cleanup_enabled=true # what a killed worker started would keep its GPU's memory
ray=(ray start --num-gpus "$NUM_GPUS" --disable-usage-stats --block)
trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT
srun --overlap --nodes 1 --ntasks 1 --nodelist "$head" \
  "${ray[@]}" --head --node-ip-address "$address" --port "$RAY_PORT" &
up() { ray status 2>/dev/null | grep -c '^ 1 node_'; }
waited() { # waited COUNT: until so many nodes have joined
  until [[ $(up) == "$1" ]]; do
    ((SECONDS < START_WAIT_S)) || { echo "only $(up) of $nodes nodes joined Ray in $SECONDS s" >&2; exit 1; }
    sleep 1
  done
}
waited 1
if ((nodes > 1)); then
  srun --overlap --nodes "$((nodes - 1))" --ntasks-per-node 1 --exclude "$head" "${ray[@]}" --address "$RAY_ADDRESS" &
  waited "$nodes"
fi
bash "$stage" "${flags[@]}" &
run=$!
trap 'kill -TERM "$run"' TERM
code=0
wait "$run" || code=$?
# A signal ends the waiting, and the run takes a step and a save longer.
while kill -0 "$run" 2>/dev/null; do code=0; wait "$run" || code=$?; done
exit "$code"

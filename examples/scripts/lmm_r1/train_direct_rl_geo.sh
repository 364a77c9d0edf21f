#!/usr/bin/env bash
# Direct RL on geometry with no text stage before: what LMM-R1 compares its two stages with (8 GPUs).
#   DATA=data/geo_split.jsonl bash examples/scripts/lmm_r1/train_direct_rl_geo.sh
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_direct_rl_geo.sh --train.num_episodes 1
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_direct_rl_geo.sh
# Without DATA, `lmm-r1 prepare_data vermulti_geo` makes the rows, those of MGT. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${RECIPE:=vermulti_geo}"
: "${OUTPUT:=runs/direct_rl_geo}"
: "${CONFIG:=$SCRIPTS/configs/direct_rl_geo.yaml}"

start_reward_service
rl_stage direct_rl "$@"

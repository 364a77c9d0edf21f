#!/usr/bin/env bash
# R1-V's geometry run: GEOQA in English, Qwen2.5-VL-3B by GRPO (8 GPUs).
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_r1v_geoqa.sh --train.num_episodes 1
#   DATA=data/rows.jsonl bash examples/scripts/lmm_r1/train_r1v_geoqa.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_r1v_geoqa.sh
# Without DATA, `lmm-r1 prepare_data geoqa_8k` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${RECIPE:=geoqa_8k}"
: "${OUTPUT:=runs/r1v_geoqa}"
: "${CONFIG:=$SCRIPTS/configs/r1v_geoqa.yaml}"

start_reward_service
rl_stage r1v_geoqa "$@"

#!/usr/bin/env bash
# R1-V's first run: counting the objects of CLEVR's images, Qwen2-VL-2B by GRPO (8 GPUs).
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_r1v_clevr.sh --train.num_episodes 1
#   DATA=data/rows.jsonl bash examples/scripts/lmm_r1/train_r1v_clevr.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_r1v_clevr.sh
# Without DATA, `lmm-r1 prepare_data clevr_70k_counting` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2-VL-2B-Instruct}"
: "${RECIPE:=clevr_70k_counting}"
: "${OUTPUT:=runs/r1v_clevr}"
: "${CONFIG:=$SCRIPTS/configs/r1v_clevr.yaml}"

start_reward_service
rl_stage r1v_clevr "$@"

#!/usr/bin/env bash
# FRE on images: the first stage of LMM-R1 on questions of perception and reasoning in place of text (8 GPUs).
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_fre_multi.sh --train.num_episodes 1
#   DATA=data/rows.jsonl bash examples/scripts/lmm_r1/train_fre_multi.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_fre_multi.sh
# Without DATA, `lmm-r1 prepare_data mathv60k` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${RECIPE:=mathv60k}"
: "${OUTPUT:=runs/fre_multi}"
: "${CONFIG:=$SCRIPTS/configs/fre_multi.yaml}"

start_reward_service
rl_stage fre_multi "$@"

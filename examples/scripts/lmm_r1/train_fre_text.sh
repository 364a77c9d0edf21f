#!/usr/bin/env bash
# FRE: foundational reasoning from questions in text only, the first stage of LMM-R1 (8 GPUs, Qwen2.5-VL-3B).
#   DATA=data/deepscaler.jsonl bash examples/scripts/lmm_r1/train_fre_text.sh
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_fre_text.sh --train.num_episodes 1
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_fre_text.sh
# Without DATA, `lmm-r1 prepare_data deepscaler_40k` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${RECIPE:=deepscaler_40k}"
: "${OUTPUT:=runs/fre_text}"
: "${CONFIG:=$SCRIPTS/configs/fre_text.yaml}"

start_reward_service
rl_stage fre "$@"

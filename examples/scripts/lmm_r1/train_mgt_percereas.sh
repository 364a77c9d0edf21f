#!/usr/bin/env bash
# MGT on perception and reasoning: the second stage of LMM-R1, from the model of the first to images of all kinds (8 GPUs).
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_mgt_percereas.sh --train.num_episodes 1
#   DATA=data/rows.jsonl bash examples/scripts/lmm_r1/train_mgt_percereas.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_mgt_percereas.sh
# Without DATA, `lmm-r1 prepare_data vermulti` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=runs/fre_text}"
: "${RECIPE:=vermulti}"
: "${OUTPUT:=runs/mgt_percereas}"
: "${CONFIG:=$SCRIPTS/configs/mgt_percereas.yaml}"

start_reward_service
rl_stage mgt_percereas "$@"

#!/usr/bin/env bash
# MGT: the second stage of LMM-R1, from the model of the first to geometry questions with images (8 GPUs).
#   MODEL=runs/fre_text DATA=data/mathv_geo.jsonl bash examples/scripts/lmm_r1/train_mgt_geo.sh
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_mgt_geo.sh --train.num_episodes 1
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_mgt_geo.sh
# Without DATA, `lmm-r1 prepare_data vermulti_geo` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=runs/fre_text}"
: "${RECIPE:=vermulti_geo}"
: "${OUTPUT:=runs/mgt_geo}"
: "${CONFIG:=$SCRIPTS/configs/mgt_geo.yaml}"

start_reward_service
rl_stage mgt "$@"

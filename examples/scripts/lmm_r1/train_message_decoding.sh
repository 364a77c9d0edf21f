#!/usr/bin/env bash
# Decode a message by a decoder whose smallest entries only a crop shows, as in r1_vlm (8 GPUs).
#   bash examples/scripts/lmm_r1/train_message_decoding.sh
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_message_decoding.sh --agent.max_turns 4
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_message_decoding.sh
# Without DATA, `lmm-r1 make_task message_decoding` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it; it judges the last turn.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${OUTPUT:=runs/message_decoding}"
: "${CONFIG:=$SCRIPTS/configs/agents.yaml}"
TASK=message_decoding
TASK_FLAGS=(--tiny_entries 5 --zoom 4)

start_reward_service
rl_stage message_decoding --train.agent tool "$@"

#!/usr/bin/env bash
# Thinking with images: find one tile among many and read it, which only a crop makes possible (8 GPUs).
#   bash examples/scripts/lmm_r1/train_visual_search.sh
#   MODEL=runs/cold_start NUM_GPUS=4 bash examples/scripts/lmm_r1/train_visual_search.sh --agent.max_turns 4
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_visual_search.sh
# Without DATA, `lmm-r1 make_task visual_search` makes the rows. With REWARD_URL empty, a reward service is started for the
# stage and stopped after it; it judges the last turn.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${OUTPUT:=runs/visual_search}"
: "${CONFIG:=$SCRIPTS/configs/agents.yaml}"
TASK=visual_search
TASK_FLAGS=(--view_px 448 --block_px 9)

start_reward_service
rl_stage visual_search --train.agent crop "$@"

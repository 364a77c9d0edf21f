#!/usr/bin/env bash
# Sokoban, move by move, with the board as a picture after each turn; the environment gives the rewards (8 GPUs).
#   bash examples/scripts/lmm_r1/train_sokoban.sh
#   AGENT=sokoban-plan NUM_GPUS=4 bash examples/scripts/lmm_r1/train_sokoban.sh
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_sokoban.sh
# Without DATA, `lmm-r1 make_task sokoban` makes the levels. With REWARD_URL, its rewards are added to the environment's.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${OUTPUT:=runs/sokoban}"
: "${CONFIG:=$SCRIPTS/configs/agents.yaml}"
: "${AGENT:=sokoban}"
TASK=sokoban
TASK_FLAGS=(--boxes 1 --max_pushes 8)

rl_stage sokoban --train.agent "$AGENT" --agent.max_turns 12 --agent.max_images 12 "$@"

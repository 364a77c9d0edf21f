#!/usr/bin/env bash
# Iterative DPO (https://arxiv.org/abs/2312.11456): in each of ROUNDS rounds the policy samples N responses to each prompt, the best
# and the worst of them by the rule are a pair, and DPO on the pairs makes the next policy of it; it is the reference itself.
#   bash examples/scripts/train_iterative_dpo.sh       in small, on a laptop's CPU, into runs/iterative_dpo
#   SEED=2 ROUNDS=4 OUTPUT=runs/two bash examples/scripts/train_iterative_dpo.sh --model.beta 0.2    flags go to each train_dpo
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct DATA=data/vermulti_geo EVAL_IMAGE=data/held_out.jsonl bash ...  on GPUs; lmm_r1/loop.sh
#   DRY_RUN=1 bash examples/scripts/train_iterative_dpo.sh
# What is finished in OUTPUT is skipped and what was stopped continued, so the same command takes up an interrupted loop.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/lmm_r1/common.sh"
: "${OUTPUT:=runs/iterative_dpo}" "${ROUNDS:=3}"
# shellcheck source=examples/scripts/lmm_r1/loop.sh
source "$SCRIPTS/loop.sh"

start
: "${CONFIG:=$CONFIGS/dpo.yaml}"
for ((round = 1; round <= ROUNDS; round++)); do
  name=round_$round
  [[ -f $ROOT/$name/stage.json ]] || sample "$name" --seed "$SEED$round" --select dpo_pairs --min_margin 1
  DATA=$ROOT/samples/$name.jsonl OUTPUT=$ROOT/$name supervised_stage train_dpo "$name" --train.seed "$SEED" "$@"
  MODEL=$ROOT/$name
  measure "$name"
done
table start

#!/usr/bin/env bash
# Rejection sampling (RAFT, https://arxiv.org/abs/2304.06767; expert iteration): in each of ROUNDS rounds the policy samples N
# responses to each prompt, and supervised training on up to MOST different right ones per prompt makes the next policy of it.
#   bash examples/scripts/train_rejection_sampling.sh       in small, on a laptop's CPU, into runs/rejection_sampling
#   SEED=2 ROUNDS=4 OUTPUT=runs/two bash examples/scripts/train_rejection_sampling.sh --adam.lr 1e-4    flags go to each train_sft
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct DATA=data/vermulti_geo EVAL_IMAGE=data/held_out.jsonl bash ...    on GPUs; lmm_r1/loop.sh
#   DRY_RUN=1 bash examples/scripts/train_rejection_sampling.sh
# What is finished in OUTPUT is skipped and what was stopped continued, so the same command takes up an interrupted loop.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/lmm_r1/common.sh"
: "${OUTPUT:=runs/rejection_sampling}" "${ROUNDS:=3}" "${MOST:=2}"
# shellcheck source=examples/scripts/lmm_r1/loop.sh
source "$SCRIPTS/loop.sh"

start
: "${CONFIG:=$CONFIGS/sft.yaml}"
for ((round = 1; round <= ROUNDS; round++)); do
  name=round_$round
  [[ -f $ROOT/$name/stage.json ]] ||
    sample "$name" --seed "$SEED$round" --select rejection_sampling --max_per_prompt "$MOST"
  DATA=$ROOT/samples/$name.jsonl OUTPUT=$ROOT/$name supervised_stage train_sft "$name" --train.seed "$SEED" "$@"
  MODEL=$ROOT/$name
  measure "$name"
done
table start

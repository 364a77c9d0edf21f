#!/usr/bin/env bash
# A reward model, and RL against it: the policy samples N responses to each prompt, a model learns to rank right and wrong ones of
# them, in PAIRS of a prompt at most (its accuracy on pairs to held-out prompts is logged), and RL takes its rewards. The table
# judges by the rule.
#   bash examples/scripts/train_rm.sh       in small, on a laptop's CPU, into runs/rm_rl, on prompts of text
#   KIND=mixed bash examples/scripts/train_rm.sh     on prompts of text and images
#   SEED=2 OUTPUT=runs/two bash examples/scripts/train_rm.sh --algo.kl.init_coef 1e-3    flags go to the RL stage
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct RM_MODEL=Qwen/Qwen2.5-VL-7B-Instruct DATA=data/vermulti_geo EVAL_IMAGE=data/held_out.jsonl \
#     bash ...    on GPUs; lmm_r1/loop.sh
#   DRY_RUN=1 bash examples/scripts/train_rm.sh
# RM_MODEL is what the reward model starts from, MODEL itself where it is empty. HELD_OUT are the prompts of the pairs that measure
# it. What is finished in OUTPUT is skipped and what was stopped continued, so the same command takes up an interrupted run.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/lmm_r1/common.sh"
: "${OUTPUT:=runs/rm_rl}" "${KIND:=text}" "${RM_MODEL:=}" "${HELD_OUT:=}" "${N:=4}"
# shellcheck source=examples/scripts/lmm_r1/loop.sh
source "$SCRIPTS/loop.sh"
# shellcheck source=examples/scripts/lmm_r1/reader.sh
source "$SCRIPTS/reader.sh"

PROMPTS=(--modality text --rows 5000) rm_flags=() rl_flags=()
# More of them in images: fewer have a right response there, and so a pair.
[[ $KIND == text ]] || PROMPTS=(--modality mixed --image_share 0.67 --rows 6000)
start
if [[ $CONFIGS == */tiny && $KIND == mixed ]]; then
  rows mixed_held_out --modality mixed --split test --rows 600
  # What the tiny start hardly reads in images, a reward model that starts from it cannot judge there.
  reader
  HELD_OUT=${HELD_OUT:-$ROOT/data/mixed_held_out} RM_MODEL=${RM_MODEL:-$ROOT/reader}
  : "${PAIRS:=4}"
  rm_flags=(--train.max_epochs 3) rl_flags=(--data.max_samples 1536)
elif [[ $CONFIGS == */tiny && -z $HELD_OUT ]]; then
  HELD_OUT=$ROOT/data/held_out
  rows held_out --modality text --split test --rows 400
fi
: "${CONFIG:=$CONFIGS/rl.yaml}" "${RM_CONFIG:=$CONFIGS/rm.yaml}" "${HELD_OUT:=${EVAL_IMAGE:-$EVAL_TEXT}}" "${PAIRS:=1}"
if [[ ! -f $ROOT/rm/stage.json ]]; then
  sample pairs --seed "$SEED" --select dpo_pairs --min_margin 1 --max_per_prompt "$PAIRS"
  DATA=$HELD_OUT sample held_out_pairs --seed "$SEED" --select dpo_pairs --min_margin 1
fi
MODEL=${RM_MODEL:-$MODEL} DATA=$ROOT/samples/pairs.jsonl CONFIG=$RM_CONFIG OUTPUT=$ROOT/rm supervised_stage train_rm rm \
  --train.seed "$SEED" --eval.dataset "$ROOT/samples/held_out_pairs.jsonl" "${rm_flags[@]}"
reward=(--reward.model_name_or_path "$ROOT/rm")
[[ -z $NUM_GPUS ]] || reward+=(--reward.num_gpus_per_node "$NUM_GPUS")
REWARD_URL='' OUTPUT=$ROOT/rl rl_stage rl "${reward[@]}" --train.seed "$SEED" "${rl_flags[@]}" "$@"
MODEL=$ROOT/rl
measure rl
table start

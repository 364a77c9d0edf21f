#!/usr/bin/env bash
# A reward model, and RL against it: the policy samples N responses to each prompt, a model learns to rank right and wrong ones of
# them, in PAIRS of a prompt at most (its accuracy on pairs to held-out prompts is logged), and RL takes its rewards. The table
# judges by the rule.
#   bash examples/scripts/train_rm.sh       in small, on a laptop's CPU, into runs/rm_rl
#   SEED=2 OUTPUT=runs/two bash examples/scripts/train_rm.sh --algo.kl.init_coef 1e-3    flags go to the RL stage
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct RM_MODEL=Qwen/Qwen2.5-VL-7B-Instruct DATA=data/vermulti_geo EVAL_IMAGE=data/held_out.jsonl \
#     bash ...    on GPUs; lmm_r1/loop.sh
#   DRY_RUN=1 bash examples/scripts/train_rm.sh
# RM_MODEL is what the reward model starts from, MODEL itself where it is empty: it cannot judge what it does not see. HELD_OUT are
# the prompts of the pairs that measure it. What is finished in OUTPUT is skipped and what was stopped continued, so the same
# command takes up an interrupted run.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/lmm_r1/common.sh"
: "${OUTPUT:=runs/rm_rl}" "${RM_MODEL:=}" "${HELD_OUT:=}" "${N:=4}" "${PAIRS:=4}"
# shellcheck source=examples/scripts/lmm_r1/loop.sh
source "$SCRIPTS/loop.sh"
# shellcheck source=examples/scripts/lmm_r1/reader.sh
source "$SCRIPTS/reader.sh"

# More of them in images: fewer have a right response there, and so a pair.
PROMPTS=(--modality mixed --image_share 0.67 --rows 6000)
start
if [[ $CONFIGS == */tiny ]]; then
  if [[ -z $HELD_OUT ]]; then
    HELD_OUT=$ROOT/data/held_out
    rows held_out --modality mixed --split test --rows 600
  fi
  if [[ -z $RM_MODEL ]]; then
    reader
    RM_MODEL=$ROOT/reader
  fi
fi
: "${CONFIG:=$CONFIGS/rl.yaml}" "${RM_CONFIG:=$CONFIGS/rm.yaml}" "${HELD_OUT:=${EVAL_IMAGE:-$EVAL_TEXT}}"
if [[ ! -f $ROOT/rm/stage.json ]]; then
  sample pairs --seed "$SEED" --select dpo_pairs --min_margin 1 --max_per_prompt "$PAIRS"
  DATA=$HELD_OUT sample held_out_pairs --seed "$SEED" --select dpo_pairs --min_margin 1
fi
MODEL=${RM_MODEL:-$MODEL} DATA=$ROOT/samples/pairs.jsonl CONFIG=$RM_CONFIG OUTPUT=$ROOT/rm supervised_stage train_rm rm \
  --train.seed "$SEED" --eval.dataset "$ROOT/samples/held_out_pairs.jsonl"
reward=(--reward.model_name_or_path "$ROOT/rm")
[[ -z $NUM_GPUS ]] || reward+=(--reward.num_gpus_per_node "$NUM_GPUS")
REWARD_URL='' OUTPUT=$ROOT/rl rl_stage rl "${reward[@]}" --train.seed "$SEED" "$@"
MODEL=$ROOT/rl
measure rl
table start

#!/usr/bin/env bash
# A curriculum: a cold start if SFT_DATA is given, then RL stages, each from the model of the one before, then evaluation
# and report. A finished stage is skipped and a finished evaluation read again, so the same command continues a run.
#   bash examples/scripts/lmm_r1/run_curriculum.sh                  FRE on text, MGT on geometry
#   bash examples/scripts/lmm_r1/run_curriculum.sh fre_text mgt_percereas --train.num_episodes 1
#   ROOT=runs/trial EVAL_TEXT=data/test_text.jsonl EVAL_IMAGE=data/test_image.jsonl SEED=1 bash ...
# A stage is the name of a script train_NAME.sh beside this one; flags behind the names go to all of them. DATA_NAME,
# CONFIG_NAME and RECIPE_NAME take the place of a stage's own; FRE_DATA, MGT_DATA and so on those of the first two.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=examples/scripts/lmm_r1/chain.sh
source "$SCRIPTS/chain.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${ROOT:=runs/curriculum}"
: "${SEED:=42}"
: "${EVAL_TEXT:=}"
: "${EVAL_IMAGE:=}"
: "${EVAL_CONFIG:=$SCRIPTS/configs/evaluate.yaml}"
take_stages "$@"

start_reward_service
checkpoints=("base=$MODEL")
if [[ -n $SFT_DATA ]]; then
  cold_start
  checkpoints=("cold_start=$MODEL")
fi
for ((place = 0; place < ${#STAGES[@]}; place++)); do
  chained "${STAGES[place]}" "${FOLDERS[place]}" --train.seed "$SEED" "${FLAGS[@]}"
  checkpoints+=("${FOLDERS[place]}=$MODEL")
done

files=()
[[ -z $EVAL_TEXT ]] || files+=("text=$EVAL_TEXT")
[[ -z $EVAL_IMAGE ]] || files+=("image=$EVAL_IMAGE")
if ((${#files[@]})); then
  run "$PYTHON" -m lmm_r1.cli.evaluate --config "$EVAL_CONFIG" --checkpoints "${checkpoints[@]}" --files "${files[@]}" \
    --output "$ROOT/evaluation.json"
fi
run "$PYTHON" -m lmm_r1.cli.report "$ROOT"

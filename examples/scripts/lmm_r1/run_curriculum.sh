#!/usr/bin/env bash
# The whole curriculum: a cold start if SFT_DATA is given, FRE on text, MGT on images, then evaluation and report.
# Each stage starts from the model of the one before; a finished stage is skipped, so the same command continues a run.
#   FRE_DATA=data/text.jsonl MGT_DATA=data/image.jsonl bash examples/scripts/lmm_r1/run_curriculum.sh
#   ROOT=runs/trial EVAL_TEXT=data/test_text.jsonl EVAL_IMAGE=data/test_image.jsonl SEED=1 bash ...
# Further flags go to both RL stages.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${ROOT:=runs/curriculum}"
: "${SFT_DATA:=}"
: "${FRE_DATA:=datasets/deepscaler_message.jsonl}"
: "${MGT_DATA:=datasets/mathv_geo_message.jsonl}"
: "${SFT_CONFIG:=$SCRIPTS/configs/cold_start.yaml}"
: "${FRE_CONFIG:=$SCRIPTS/configs/fre_text.yaml}"
: "${MGT_CONFIG:=$SCRIPTS/configs/mgt_geo.yaml}"
: "${SEED:=42}"
: "${EVAL_TEXT:=}"
: "${EVAL_IMAGE:=}"
: "${EVAL_CONFIG:=$SCRIPTS/configs/evaluate.yaml}"

start_reward_service
checkpoints=("base=$MODEL")

if [[ -n $SFT_DATA ]]; then
  launcher=("$PYTHON")
  # One process for each GPU.
  processes=${NUM_GPUS:-$(gpus_here)}
  ((processes <= 1)) || launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$processes")
  inputs=(--model.model_name_or_path "$MODEL" --data.dataset "$SFT_DATA")
  OUTPUT=$ROOT/cold_start
  outputs=(--ckpt.output_dir "$OUTPUT" --logger.stage_name cold_start)
  fit_to_memory sft
  stage "$OUTPUT" "${launcher[@]}" -m lmm_r1.cli.train_sft --config "$SFT_CONFIG" "${FITTING[@]}" \
    "${inputs[@]}" "${outputs[@]}" --train.seed "$SEED"
  MODEL=$OUTPUT
  checkpoints=("cold_start=$MODEL")
fi

MODEL=$MODEL DATA=$FRE_DATA OUTPUT=$ROOT/fre CONFIG=$FRE_CONFIG rl_stage fre --train.seed "$SEED" "$@"
MODEL=$ROOT/fre DATA=$MGT_DATA OUTPUT=$ROOT/mgt CONFIG=$MGT_CONFIG rl_stage mgt --train.seed "$SEED" "$@"
checkpoints+=("fre=$ROOT/fre" "mgt=$ROOT/mgt")

files=()
[[ -z $EVAL_TEXT ]] || files+=("text=$EVAL_TEXT")
[[ -z $EVAL_IMAGE ]] || files+=("image=$EVAL_IMAGE")
if ((${#files[@]})); then
  run "$PYTHON" -m lmm_r1.cli.evaluate --config "$EVAL_CONFIG" --checkpoints "${checkpoints[@]}" --files "${files[@]}" \
    --output "$ROOT/evaluation.json"
fi
run "$PYTHON" -m lmm_r1.cli.report "$ROOT" --seconds "$SECONDS"

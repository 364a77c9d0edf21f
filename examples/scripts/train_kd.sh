#!/usr/bin/env bash
# Distillation: a teacher answers the prompts once, and a weaker student learns its responses two ways, each from the start and
# with as many updates: `alone` from the tokens that the teacher drew, and `taught` from its distribution over each of them
# (forward KL). The table compares with `alone`.
#   bash examples/scripts/train_kd.sh       in small, on a laptop's CPU, into runs/kd_demo
#   SEED=2 OUTPUT=runs/two bash examples/scripts/train_kd.sh --model.kd_loss jsd    flags go to each distillation
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct TEACHER=Qwen/Qwen2.5-VL-7B-Instruct DATA=data/vermulti_geo EVAL_IMAGE=data/held_out.jsonl \
#     bash ...    on GPUs; lmm_r1/loop.sh
#   DRY_RUN=1 bash examples/scripts/train_kd.sh
# What is finished in OUTPUT is skipped and what was stopped continued, so the same command takes up an interrupted run.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/lmm_r1/common.sh"
: "${OUTPUT:=runs/kd_demo}" "${TEACHER:=}"
# shellcheck source=examples/scripts/lmm_r1/loop.sh
source "$SCRIPTS/loop.sh"
# shellcheck source=examples/scripts/lmm_r1/reader.sh
source "$SCRIPTS/reader.sh"

start
if [[ -z $TEACHER && $CONFIGS == */tiny ]]; then
  reader
  TEACHER=$ROOT/reader
fi
if [[ -z $TEACHER ]]; then
  echo "${0##*/}: MODEL=$MODEL needs a TEACHER, with the same tokenizer" >&2
  exit 2
fi
: "${CONFIG:=$CONFIGS/kd.yaml}"
# All that end are kept, right or wrong: nobody need know the answers.
[[ -f $ROOT/taught/stage.json ]] ||
  MODEL=$TEACHER N=1 sample teacher --seed "$SEED" --select rejection_sampling --min_reward 0

# learn COMMAND NAME FLAGS...: the student OUTPUT/NAME, from the teacher's responses.
learn() {
  DATA=$ROOT/samples/teacher.jsonl OUTPUT=$ROOT/$2 supervised_stage "$1" "$2" --train.seed "$SEED" "${@:3}"
  MODEL=$ROOT/$2 measure "$2"
}

# The teacher drew the rows itself: its distributions say all that they say, without the chance of the draw.
taught=(--teacher.model_name_or_path "$TEACHER" --model.kd_coef 1)
learn train_sft alone
learn train_kd taught "${taught[@]}" "$@"
MODEL=$TEACHER measure teacher
table alone

#!/usr/bin/env bash
# Distillation in small, on a laptop's CPU: a tiny Qwen2.5-VL that adds and sorts digits, in text and images, teaches a smaller
# one, on the rows that it has seen and then on responses that the student samples itself (GKD). The same student also learns
# the same rows without a teacher, and a table compares all on held-out rows.
#   bash examples/scripts/train_kd.sh                    into runs/kd_demo
#   SEED=2 bash examples/scripts/train_kd.sh runs/two    another seed, into runs/two
#   bash examples/scripts/train_kd.sh runs/jsd --model.kd_loss jsd    flags behind the folder go to each distillation
# ROWS is how many they see, OWN_STEPS how many updates follow on the student's own responses. A finished stage is skipped and
# a stopped one continued.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

ROOT=${1:-runs/kd_demo}
: "${SEED:=1}" "${PYTHON:=python}" "${ROWS:=12800}" "${OWN_STEPS:=100}"
data=$ROOT/data
configs=$here/lmm_r1/configs/demo

# rows NAME FLAGS...: the row folder NAME of the task `digits`, unless it is there already.
rows() {
  [[ -d $data/$1 ]] || "$PYTHON" -m lmm_r1.cli.make_task digits --output "$data/$1" "${@:2}"
}

# model NAME WIDTH: a random one, unless it is there already.
model() {
  [[ -d $ROOT/$1 ]] || "$PYTHON" -m lmm_r1.cli.make_tiny_model --arch qwen2_5_vl --seed "$SEED" --hidden_size "$2" \
    --output "$ROOT/$1"
}

# train COMMAND NAME MODEL DATA FLAGS...: a stage into ROOT/NAME, unless it is finished.
train() {
  [[ -f $ROOT/$2/stage.json ]] || "$PYTHON" -m "lmm_r1.cli.$1" --config "$configs/cold_start.yaml" --train.seed "$SEED" \
    --model.model_name_or_path "$ROOT/$3" --data.dataset "$4" --ckpt.output_dir "$ROOT/$2" --logger.stage_name "$2" "${@:5}"
}

echo "distillation: seed $SEED, into $ROOT"
solved=(--modality mixed --split train --solutions --seed "$SEED" --min-digits 2)
rows first "${solved[@]}" --rows "$((ROWS * 3 / 8))" --max-image-digits 1
rows later "${solved[@]}" --rows "$((ROWS * 5 / 8))"
rows text --modality text --split test --rows 200 --seed "$SEED"
rows image --modality image --split test --rows 200 --seed "$SEED"
model wide 128
model narrow 64
train train_sft teacher wide "$data/first,$data/later"
train train_sft alone narrow "$data/first,$data/later"
taught=(--teacher.model_name_or_path "$ROOT/teacher" "${@:2}")
train train_kd taught narrow "$data/first,$data/later" "${taught[@]}"
train train_kd own taught "$data/later" "${taught[@]}" --model.kd_coef 1 --rollout.on_policy_share 1 \
  --rollout.max_new_tokens 80 --train.max_steps "$OWN_STEPS" --adam.lr 5e-4
"$PYTHON" -m lmm_r1.cli.evaluate --config "$configs/evaluate.yaml" --baseline alone --output "$ROOT/evaluation.json" \
  --checkpoints teacher="$ROOT/teacher" alone="$ROOT/alone" taught="$ROOT/taught" own="$ROOT/own" \
  --files text="$data/text" image="$data/image"

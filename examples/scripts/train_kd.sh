#!/usr/bin/env bash
# Distillation in small, on a laptop's CPU: a tiny Qwen2.5-VL that adds and sorts digits, in text and images, teaches a smaller
# one, on the rows that it has seen and then on what the student writes itself (GKD in rounds). The same student also learns
# the same rows without a teacher, and a table compares all on held-out rows.
#   bash examples/scripts/train_kd.sh                    into runs/kd_demo
#   SEED=2 ROUNDS=0 bash examples/scripts/train_kd.sh runs/two    another seed, and no responses of the student's own
#   bash examples/scripts/train_kd.sh runs/jsd --model.kd_loss jsd    flags behind the folder go to each distillation
# ROWS and PROMPTS are how many they see. A finished stage is skipped and a stopped one continued.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

ROOT=${1:-runs/kd_demo}
: "${SEED:=1}" "${PYTHON:=python}" "${ROWS:=12800}" "${PROMPTS:=1600}" "${ROUNDS:=2}"
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
student=taught compared=(teacher="$ROOT/teacher" alone="$ROOT/alone" taught="$ROOT/taught")
for ((round = 1; round <= ROUNDS; round++)); do
  rows "prompts_$round" --modality mixed --split train --rows "$PROMPTS" --seed "$round$SEED"
  own=$data/own_$round.jsonl
  # Every response that ends, right or wrong.
  [[ -f $own ]] || "$PYTHON" -m lmm_r1.cli.batch_inference --model "$ROOT/$student" --data "$data/prompts_$round" \
    --output "$data/responses_$round.jsonl" --temperature 1 --max_new_tokens 80 --max_model_len 2048 --dtype float32 \
    --verifier math --select rejection_sampling --min_reward 0 --selected "$own" --overwrite
  train train_kd "own_$round" "$student" "$own" "${taught[@]}" --model.kd_coef 1 --adam.lr 5e-4
  student=own_$round compared+=("own_$round=$ROOT/own_$round")
done
"$PYTHON" -m lmm_r1.cli.evaluate --config "$configs/evaluate.yaml" --checkpoints "${compared[@]}" --baseline alone \
  --files text="$data/text" image="$data/image" --output "$ROOT/evaluation.json"

#!/usr/bin/env bash
# Each family of tasks by itself: a cold start from a random model that half learns it, then RL (docs/tasks.md).
#   bash examples/scripts/lmm_r1/learn_families.sh                           all families in text, into runs/families
#   FAMILIES="clock maze" MODALITY=image COLD_ROWS=6400 ROOT=runs/images bash examples/scripts/lmm_r1/learn_families.sh
# Flags go to all RL stages. A finished stage is skipped and a stopped one continued.
#   MODALITY    text, image or mixed
#   COLD_ROWS, STEPS  worked solutions of each cold start, and RL steps; by default, as many as each family needs
#   PROMPTS     of an RL step; TEST_ROWS: with combinations of factors that no training row has
#   LEVEL       difficulty of all rows
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# Rows of a cold start and RL steps, for text of difficulty 1.
declare -A SIZES=([count]='480 24' [clock]='960 24' [bar_chart]='1440 24' [line_chart]='1440 24' [pie_chart]='1600 48'
  [geometry]='2080 24' [compare]='2560 24' [maze]='3200 48' [relations]='4800 48' [dice]='3200 48' [calendar]='4800 48'
  [money]='4800 48' [cards]='4800 48' [function_graph]='4800 48')
: "${ROOT:=runs/families}" "${SEED:=1}" "${FAMILIES:=${!SIZES[*]}}" "${MODALITY:=text}"
: "${PROMPTS:=64}" "${TEST_ROWS:=200}" "${LEVEL:=1}"

# rows NAME FLAGS...: the row folder ROOT/NAME/FAMILY, unless it is there already.
rows() {
  [[ -d $ROOT/$1/$FAMILY ]] || run "$PYTHON" -m lmm_r1.cli.make_task "$FAMILY" --modality "$MODALITY" --difficulty "$LEVEL" \
    --output "$ROOT/$1/$FAMILY" "${@:2}"
}

start_reward_service
for FAMILY in $FAMILIES; do
  read -r cold_rows steps <<<"${SIZES[$FAMILY]:?learn_families.sh: no family $FAMILY; known are ${!SIZES[*]}}"
  cold_rows=${COLD_ROWS:-$cold_rows} prompts=$((${STEPS:-$steps} * PROMPTS))
  rows solutions --rows "$cold_rows" --seed "${SEED}0" --solutions
  rows prompts --rows "$prompts" --seed "${SEED}1"
  rows test --rows "$TEST_ROWS" --seed 0 --split test
  models=$ROOT/models/$FAMILY
  [[ -d $models/tiny ]] || run "$PYTHON" -m lmm_r1.cli.make_tiny_model --arch qwen2_5_vl --hidden_size 128 --layers 2 \
    --tasks "$FAMILY" --seed "$SEED" --output "$models/tiny"
  MODEL=$models/tiny DATA=$ROOT/solutions/$FAMILY CONFIG=$SCRIPTS/configs/demo/cold_start.yaml OUTPUT=$models/cold_start \
    supervised_stage train_sft cold_start --train.seed "$SEED" --data.no_keep_order
  MODEL=$models/cold_start DATA=$ROOT/prompts/$FAMILY CONFIG=$SCRIPTS/configs/demo/mgt.yaml OUTPUT=$models/rl \
    rl_stage rl --data.max_samples "$prompts" --rollout.batch_size "$PROMPTS" --train.batch_size "$PROMPTS" \
    --rollout.max_new_tokens 48 --actor.adam.lr 2e-4 --train.seed "$SEED" "$@"
  [[ -f $ROOT/evaluation/$FAMILY.json ]] || run "$PYTHON" -m lmm_r1.cli.evaluate \
    --config "$SCRIPTS/configs/demo/evaluate.yaml" --max_new_tokens 48 --checkpoints "cold_start=$models/cold_start" \
    "rl=$models/rl" --files "test=$ROOT/test/$FAMILY" --output "$ROOT/evaluation/$FAMILY.json"
done

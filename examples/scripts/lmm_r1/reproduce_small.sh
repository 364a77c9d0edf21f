#!/usr/bin/env bash
# The paper's claim in small: FRE before MGT, against RL on images from the start, with equal samples and steps (docs/claim.md).
#   bash examples/scripts/lmm_r1/reproduce_small.sh                          five arms, three seeds, into runs/claim
#   SEEDS="1 2 3 4 5" ROOT=runs/five bash examples/scripts/lmm_r1/reproduce_small.sh
#   ARMS="direct fre_25 fre_text fre_75" HIDDEN=192 ROOT=runs/wide bash examples/scripts/lmm_r1/reproduce_small.sh
#   SCALE=30 NUM_GPUS=1 bash examples/scripts/lmm_r1/reproduce_small.sh      a language model of about 30 million parameters
# Flags go to all RL stages. A finished stage is skipped and a stopped one continued, so the same command takes up an
# interrupted study. At the end, benchmarks/claim.py writes claim.json, claim.md and claim.svg into ROOT.
#   PROMPTS     of an RL step; STEPS, a multiple of 4: RL steps of an arm, over both of its stages
#   COLD_ROWS   worked solutions of the cold start; TEST_ROWS: held-out rows of each family and modality
#   LEVEL       difficulty of all rows
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=examples/scripts/lmm_r1/chain.sh
source "$SCRIPTS/chain.sh"
# shellcheck source=examples/scripts/lmm_r1/claim.sh
source "$SCRIPTS/claim.sh"

: "${SEEDS:=1 2 3}" "${ARMS:=direct fre_text fre_multi reversed mixed}"
TOP=${ROOT:-runs/claim}
if ((STEPS % 4)); then
  echo "reproduce_small.sh: STEPS=$STEPS must be a multiple of 4, so that each share of FRE is a whole number of steps" >&2
  exit 2
fi

# measure CHECKPOINTS...: the same held-out rows for every seed, in words and in pictures.
measure() {
  local family modality files=()
  for family in "${FAMILIES[@]}"; do
    for modality in text image; do
      family_rows "test_$modality" "$family" --modality "$modality" --split test --rows "$TEST_ROWS" --seed 0
      files+=("$family.$modality=$ROOT/data/test_$modality/$family")
    done
  done
  run "$PYTHON" -m lmm_r1.cli.evaluate --config "$SCRIPTS/configs/demo/evaluate.yaml" --max_new_tokens 48 \
    --checkpoints "$@" --files "${files[@]}" --output "$ROOT/evaluation.json"
}

start_reward_service
for SEED in $SEEDS; do
  ROOT=$TOP/seed$SEED
  from_cold_start
  checkpoints=("cold_start=$ROOT/cold_start")
  for name in $ARMS; do
    arm "$name" "$@"
    checkpoints+=("$name=$MODEL")
  done
  measure "${checkpoints[@]}"
done
run "$PYTHON" "$SCRIPTS/../../../benchmarks/claim.py" "$TOP" --trained "${TRAINED[@]}"

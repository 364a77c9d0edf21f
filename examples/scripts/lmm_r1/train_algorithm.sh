#!/usr/bin/env bash
# One of the algorithms in configs/algorithms/, with its paper's settings, on text or on images (8 GPUs, Qwen2.5-VL-3B).
#   bash examples/scripts/lmm_r1/train_algorithm.sh gspo image
#   NUM_GPUS=4 OUTPUT=runs/trial bash examples/scripts/lmm_r1/train_algorithm.sh dapo text --train.num_episodes 1
#   DRY_RUN=1 bash examples/scripts/lmm_r1/train_algorithm.sh sapo
# Without a name it is grpo, on text. All else is the settings of FRE on text and on images; an algorithm's file goes on top of any
# other RL stage's without a critic, too: bash train_sokoban.sh --config configs/algorithms/rloo.yaml. Without DATA,
# `lmm-r1 prepare_data deepscaler_40k` makes the rows of text, and that of vermulti_geo those with images.
set -euo pipefail
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ALGORITHM=grpo MODALITY=text
if (($#)) && [[ $1 != --* ]]; then ALGORITHM=$1 && shift; fi
if (($#)) && [[ $1 != --* ]]; then MODALITY=$1 && shift; fi
FILE=$SCRIPTS/configs/algorithms/$ALGORITHM.yaml
if [[ ! -f $FILE ]]; then
  echo "train_algorithm.sh: $ALGORITHM is none of $(basename -s .yaml "$SCRIPTS"/configs/algorithms/*.yaml | paste -sd ' ')" >&2
  exit 2
fi
case $MODALITY in
  text) : "${RECIPE:=deepscaler_40k}" "${CONFIG:=$SCRIPTS/configs/fre_text.yaml}" ;;
  image) : "${RECIPE:=vermulti_geo}" "${CONFIG:=$SCRIPTS/configs/fre_multi.yaml}" ;;
  *) echo "train_algorithm.sh: rows are of text or of image, not of $MODALITY" >&2 && exit 2 ;;
esac
: "${MODEL:=Qwen/Qwen2.5-VL-3B-Instruct}"
: "${OUTPUT:=runs/${ALGORITHM}_$MODALITY}"

start_reward_service
rl_stage "$ALGORITHM" --config "$FILE" "$@"

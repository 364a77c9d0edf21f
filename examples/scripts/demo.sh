#!/usr/bin/env bash
# The two-stage curriculum in small, on a laptop's CPU: a tiny Qwen2.5-VL from scratch learns to add and sort digits,
# from text first and from handwriting then. Same scripts, trainer, engine and reward service as on a GPU cluster.
#   bash examples/scripts/demo.sh                    into runs/demo
#   SEED=2 bash examples/scripts/demo.sh runs/two    another seed, into runs/two
#   ARCH=gemma3 bash examples/scripts/demo.sh        another architecture (lmm-r1 kits lists them)
#   bash examples/scripts/demo.sh runs/ppo --algo.advantage.estimator gae    flags behind the folder go to both RL stages
# A finished stage is skipped and a stopped one continued, so the same command takes up an interrupted demo.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/scripts/lmm_r1/common.sh
source "$here/lmm_r1/common.sh"

ROOT=${1:-runs/demo}
: "${SEED:=1}"
# shellcheck source=examples/scripts/lmm_r1/digits.sh
source "$SCRIPTS/digits.sh"

echo "demo: seed $SEED, into $ROOT"
digits
rows text_prompts --modality text --split train --rows 1000
rows image_prompts --modality image --split train --rows 1000

export PYTHON ROOT SEED NUM_GPUS='' MODEL=$ROOT/tiny SFT_DATA EVAL_TEXT EVAL_IMAGE
export FRE_DATA=$ROOT/data/text_prompts MGT_DATA=$ROOT/data/image_prompts
FRE_CONFIG=$(demo_config fre) MGT_CONFIG=$(demo_config mgt) EVAL_CONFIG=$(demo_config evaluate)
export SFT_CONFIG FRE_CONFIG MGT_CONFIG EVAL_CONFIG
"$SCRIPTS/run_curriculum.sh" "${@:2}"
echo "demo: open $ROOT/report.html in a browser"

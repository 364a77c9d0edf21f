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

ROOT=${1:-runs/demo}
: "${SEED:=1}"
: "${ARCH:=qwen2_5_vl}"
: "${PYTHON:=python}"
data=$ROOT/data

# rows NAME FLAGS...: the row folder NAME of the task `digits`, unless it is there already.
rows() {
  [[ -d $data/$1 ]] || "$PYTHON" -m lmm_r1.cli.make_task digits --output "$data/$1" --seed "$SEED" "${@:2}"
}

echo "demo: seed $SEED, into $ROOT"
[[ -d $ROOT/tiny ]] || "$PYTHON" -m lmm_r1.cli.make_tiny_model --arch "$ARCH" --seed "$SEED" --output "$ROOT/tiny"
# The cold start sees images of one digit first, then of two and three: without that it learns to read much later.
rows first_solutions --modality mixed --split train --rows 4800 --solutions --min-digits 2 --max-image-digits 1
rows then_solutions --modality mixed --split train --rows 8000 --solutions --min-digits 2
rows text_prompts --modality text --split train --rows 1000
rows image_prompts --modality image --split train --rows 1000
rows text_test --modality text --split test --rows 200
rows image_test --modality image --split test --rows 200

export PYTHON ROOT SEED MODEL=$ROOT/tiny NUM_GPUS=
export SFT_DATA=$data/first_solutions,$data/then_solutions FRE_DATA=$data/text_prompts MGT_DATA=$data/image_prompts
export EVAL_TEXT=$data/text_test EVAL_IMAGE=$data/image_test
export SFT_CONFIG=$here/lmm_r1/configs/demo/cold_start.yaml
export FRE_CONFIG=$here/lmm_r1/configs/demo/fre.yaml
export MGT_CONFIG=$here/lmm_r1/configs/demo/mgt.yaml
export EVAL_CONFIG=$here/lmm_r1/configs/demo/evaluate.yaml
"$here/lmm_r1/run_curriculum.sh" "${@:2}"
echo "demo: open $ROOT/report.html in a browser"

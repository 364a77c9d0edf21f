# shellcheck shell=bash
# Sourced by the demo and the loops: a tiny model and rows of the task `digits`, in ROOT, for SEED.
: "${SCRIPTS:?digits.sh is sourced behind common.sh}"
: "${ARCH:=qwen2_5_vl}"

# rows NAME FLAGS...: the row folder ROOT/data/NAME, unless it is there already.
rows() {
  [[ -d $ROOT/data/$1 ]] || run "$PYTHON" -m lmm_r1.cli.make_task digits --output "$ROOT/data/$1" --seed "$SEED" "${@:2}"
}

# digits: a random model ROOT/tiny, what its cold start learns from, and held-out rows.
# shellcheck disable=SC2034  # who sources this reads them
digits() {
  [[ -d $ROOT/tiny ]] || run "$PYTHON" -m lmm_r1.cli.make_tiny_model --arch "$ARCH" --seed "$SEED" --output "$ROOT/tiny"
  # The cold start sees images of one digit first, then of two and three: without that it learns to read much later.
  rows first_solutions --modality mixed --split train --rows 4800 --solutions --min-digits 2 --max-image-digits 1
  rows then_solutions --modality mixed --split train --rows 8000 --solutions --min-digits 2
  rows text_test --modality text --split test --rows 200
  rows image_test --modality image --split test --rows 200
  SFT_DATA=$ROOT/data/first_solutions,$ROOT/data/then_solutions
  EVAL_TEXT=$ROOT/data/text_test EVAL_IMAGE=$ROOT/data/image_test
}

# shellcheck shell=bash
# Sourced by the demo, make released and the loops: a tiny model and rows of the task `digits`, in ROOT, for SEED.
: "${SCRIPTS:?digits.sh must be sourced after common.sh}"
: "${ARCH:=qwen2_5_vl}" "${ROW_SETTINGS:=demo}"

# demo_config NAME: the settings NAME in ROW_SETTINGS, in the file of the architecture where it has one of its own.
demo_config() {
  local folder=$SCRIPTS/configs/$ROW_SETTINGS
  [[ ! -f $folder/$ARCH/$1.yaml ]] || folder=$folder/$ARCH
  echo "$folder/$1.yaml"
}

# rows NAME FLAGS...: the row folder ROOT/data/NAME, unless it is there already.
rows() {
  [[ -d $ROOT/data/$1 ]] || run "$PYTHON" -m lmm_r1.cli.make_task digits --config "$(demo_config rows)" \
    --output "$ROOT/data/$1" --seed "$SEED" "${@:2}"
}

# digits: a random model ROOT/tiny, what its cold start learns from and how, and held-out rows.
# shellcheck disable=SC2034  # who sources this reads them
digits() {
  [[ -d $ROOT/tiny ]] || run "$PYTHON" -m lmm_r1.cli.make_tiny_model --config "$(demo_config tiny)" --arch "$ARCH" \
    --seed "$SEED" --output "$ROOT/tiny"
  rows first_solutions --config "$(demo_config first_rows)" --modality mixed --split train --solutions
  rows then_solutions --config "$(demo_config then_rows)" --modality mixed --split train --solutions
  rows text_test --modality text --split test --rows 200
  rows image_test --modality image --split test --rows 200
  SFT_DATA=$ROOT/data/first_solutions,$ROOT/data/then_solutions
  SFT_CONFIG=$(demo_config cold_start)
  EVAL_TEXT=$ROOT/data/text_test EVAL_IMAGE=$ROOT/data/image_test
}

# shellcheck shell=bash
# Sourced by the loops: what they start from, how responses are sampled, and the table at the end.
#   MODEL      the policy to start from; empty: a tiny Qwen2.5-VL, with rows of the task `digits`, after the demo's cold start
#   DATA       prompts with answers; EVAL_TEXT, EVAL_IMAGE: held-out ones, one of the two at least
#   OUTPUT     where everything goes; what is finished there is not done again
#   N          responses to each prompt, judged by VERIFIER
#   SAMPLING   settings of batch_inference; EVAL_CONFIG: those of evaluate
: "${SCRIPTS:?loop.sh must be sourced after common.sh}"
: "${MODEL:=}" "${DATA:=}" "${EVAL_TEXT:=}" "${EVAL_IMAGE:=}" "${N:=8}" "${VERIFIER:=math}" "${SEED:=1}"
ROOT=$OUTPUT MEASURED=()
# The prompts that are made where the user names none.
PROMPTS=(--modality mixed --rows 1280)
# shellcheck source=examples/scripts/lmm_r1/digits.sh
source "$SCRIPTS/digits.sh"

# start: MODEL, DATA and the held-out rows, made where the user names none, and CONFIGS, the folder of the settings.
start() {
  CONFIGS=$SCRIPTS/configs/loops
  if [[ -z $MODEL ]]; then
    CONFIGS=$CONFIGS/tiny
    : "${EVAL_CONFIG:=$SCRIPTS/configs/demo/evaluate.yaml}"
    digits
    rows prompts --split train "${PROMPTS[@]}"
    MODEL=$ROOT/tiny DATA=$SFT_DATA CONFIG=$SFT_CONFIG OUTPUT=$ROOT/cold_start \
      supervised_stage train_sft cold_start --train.seed "$SEED"
    MODEL=$ROOT/cold_start DATA=$ROOT/data/prompts
  elif [[ -z $DATA || -z $EVAL_TEXT$EVAL_IMAGE ]]; then
    echo "${0##*/}: MODEL=$MODEL needs DATA, rows with answers, and held-out ones in EVAL_TEXT or EVAL_IMAGE" >&2
    exit 2
  fi
  : "${SAMPLING:=$CONFIGS/sampling.yaml}" "${EVAL_CONFIG:=$SCRIPTS/configs/evaluate.yaml}"
  measure start
}

# sample NAME FLAGS...: N responses of MODEL to each prompt of DATA, and the rows that FLAGS select into OUTPUT/samples/NAME.
sample() {
  run_on_rows "$PYTHON" -m lmm_r1.cli.batch_inference --config "$SAMPLING" --model "$MODEL" --data "$DATA" \
    --n_samples "$N" --reward "$VERIFIER" --engines "$(processes)" --output "$ROOT/samples/$1.all.jsonl" \
    --selected "$ROOT/samples/$1.jsonl" "${@:2}"
  if [[ $DRY_RUN != 1 && ! -s $ROOT/samples/$1.jsonl ]]; then
    echo "${0##*/}: VERIFIER=$VERIFIER leaves none of MODEL=$MODEL's N=$N responses a prompt to train on; sample more of them (N)" >&2
    exit 1
  fi
}

# measure NAME: MODEL on the held-out rows, unless that was done.
measure() {
  local file=$ROOT/measured/$1.json files=()
  [[ -z $EVAL_TEXT ]] || files+=("text=$EVAL_TEXT")
  [[ -z $EVAL_IMAGE ]] || files+=("image=$EVAL_IMAGE")
  [[ -f $file ]] || run_on_rows "$PYTHON" -m lmm_r1.cli.evaluate --config "$EVAL_CONFIG" --checkpoints "$1=$MODEL" \
    --files "${files[@]}" --reward "$VERIFIER" --output "$file"
  MEASURED+=("$1=$file")
}

# table BASELINE: all that was measured, with intervals, beside the one of this name.
table() {
  run "$PYTHON" -m lmm_r1.cli.evaluate --compare "${MEASURED[@]}" --baseline "$1" --output "$ROOT/evaluation.json"
}

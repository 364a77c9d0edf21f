# shellcheck shell=bash
# Sourced by common.sh: what an RL stage is, and its rows, made from a public dataset or by a task where the user names none.
#   DATA         row files of one's own; empty: the stage's recipe makes them
#   RECIPE       another recipe than the stage's, by name or as a YAML file (lmm-r1 prepare_data --list_recipes)
#   DATA_FOLDER  where rows are made, a folder for each recipe
#   ROWS         how many rows a stage's task makes
#   SOURCES      a folder with a local copy of each dataset under its recipe's name; empty: the Hugging Face hub
: "${DATA_FOLDER:=data}"
: "${SOURCES:=}"
: "${ROWS:=4096}"

# prepare_data: sets DATA, and makes the rows unless they are there; rows that cannot be used are listed and do not stop it.
prepare_data() {
  [[ -z ${DATA:-} ]] || return 0
  if [[ -n ${TASK:-} ]]; then make_rows && return 0; fi
  local name
  name=$(basename "$RECIPE" .yaml)
  DATA=$DATA_FOLDER/$name
  local source=()
  [[ -z $SOURCES ]] || source=(--source "$SOURCES/$name")
  run_on_rows "$PYTHON" -m lmm_r1.cli.prepare_data "$RECIPE" --output "$DATA" "${source[@]}" || missing_rows "$name" "$?"
}

# missing_rows NAME CODE: says which rows the stage lacks and the ways to them, and ends the script.
missing_rows() {
  echo "$(basename "$0"): the rows of this stage are those of the recipe $1, and they could not be made. From a copy of the" \
    "dataset: lmm-r1 prepare_data $RECIPE --source COPY --output $DATA, or SOURCES=FOLDER with the copy as FOLDER/$1;" \
    "rows of your own: DATA=rows.jsonl (docs/recipes.md)" >&2
  exit "$2"
}

# make_rows: sets DATA, and makes the rows of TASK by TASK_FLAGS unless they are there.
make_rows() {
  DATA=$DATA_FOLDER/$TASK
  [[ -d $DATA ]] || run "$PYTHON" -m lmm_r1.cli.make_task "$TASK" --modality image --rows "$ROWS" --output "$DATA" \
    "${TASK_FLAGS[@]}"
}

# rl_stage NAME FLAGS...: one RL stage from MODEL on the rows in DATA, or of RECIPE, into OUTPUT, as CONFIG says.
rl_stage() {
  if [[ ! -f $OUTPUT/stage.json ]]; then prepare_data; fi
  local inputs=(--actor.model_name_or_path "$MODEL" --data.prompt_dataset "$DATA")
  [[ -z $REWARD_URL ]] || inputs+=(--reward.remote_url "$REWARD_URL")
  local outputs=(--ckpt.output_dir "$OUTPUT" --logger.stage_name "$1")
  local gpus=()
  [[ -z $NUM_GPUS ]] || gpus=(
    --actor.num_gpus_per_node "$NUM_GPUS" --critic.num_gpus_per_node "$NUM_GPUS" --ref.num_gpus_per_node "$NUM_GPUS"
    --vllm.num_engines "$NUM_GPUS"
  )
  fit_to_memory rl
  stage "$OUTPUT" "$PYTHON" -m lmm_r1.cli.train_ppo_ray --config "$CONFIG" "${FITTING[@]}" \
    "${inputs[@]}" "${outputs[@]}" "${gpus[@]}" "${@:2}"
}

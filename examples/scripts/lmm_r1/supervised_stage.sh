# shellcheck shell=bash
# Sourced by common.sh: what a stage of a supervised trainer is.

# processes: how many engines sample, one for each GPU.
processes() {
  local gpus=${NUM_GPUS:-$(gpus_here)}
  echo "$((gpus > 1 ? gpus : 1))"
}

# supervised_stage COMMAND NAME FLAGS...: one stage of train_sft, train_dpo, ... from MODEL on the rows in DATA into OUTPUT,
# as CONFIG says.
supervised_stage() {
  # The command takes all visible GPUs by itself.
  [[ -z ${NUM_GPUS:-} ]] || export PET_NPROC_PER_NODE=$NUM_GPUS
  fit_to_memory sft
  stage "$OUTPUT" "$PYTHON" -m "lmm_r1.cli.$1" --config "$CONFIG" "${FITTING[@]}" \
    --model.model_name_or_path "$MODEL" --data.dataset "$DATA" \
    --ckpt.output_dir "$OUTPUT" --logger.stage_name "$2" "${@:3}"
}

# shellcheck shell=bash
# Sourced by common.sh: what a stage of a supervised trainer is.

# processes: how many a supervised stage has, one for each GPU.
processes() {
  local gpus=${NUM_GPUS:-$(gpus_here)}
  echo "$((gpus > 1 ? gpus : 1))"
}

# supervised_stage COMMAND NAME FLAGS...: one stage of train_sft, train_dpo, ... from MODEL on the rows in DATA into OUTPUT,
# as CONFIG says.
supervised_stage() {
  local launcher=("$PYTHON") count
  count=$(processes)
  ((count == 1)) || launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$count")
  fit_to_memory sft
  stage "$OUTPUT" "${launcher[@]}" -m "lmm_r1.cli.$1" --config "$CONFIG" "${FITTING[@]}" \
    --model.model_name_or_path "$MODEL" --data.dataset "$DATA" \
    --ckpt.output_dir "$OUTPUT" --logger.stage_name "$2" "${@:3}"
}

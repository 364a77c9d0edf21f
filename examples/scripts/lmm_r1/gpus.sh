# shellcheck shell=bash
# Sourced by common.sh: what follows from the GPUs that there are.
#   MEMORY   GB of each GPU, 80 or 24; with NUM_GPUS it chooses settings that fit, see configs/memory/
: "${MEMORY:=}"

# fit_to_memory rl|sft: the settings that stand on top of a stage's own, as arguments in FITTING.
# The stages' files are for 8 GPUs of 80 GB.
# shellcheck disable=SC2034  # common.sh and run_curriculum.sh read it
fit_to_memory() {
  FITTING=()
  if ((${MEMORY:-80} < 80)); then
    FITTING=(--config "$SCRIPTS/configs/memory/$1_24gb.yaml")
  elif [[ $NUM_GPUS == 1 ]]; then
    FITTING=(--config "$SCRIPTS/configs/memory/$1_one_80gb.yaml")
  fi
}

# gpus_here: how many GPUs this machine has for the script's commands.
gpus_here() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[0-9]' || true
  else
    { nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l
  fi
}

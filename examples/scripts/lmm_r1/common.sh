# shellcheck shell=bash
# Sourced by the stage scripts: how a command is shown or run, and when a stage is skipped.
#   PYTHON      the interpreter that lmm_r1 is installed in
#   NUM_GPUS    GPUs that policy, critic, reference and engines share; empty: as the config file says
#   DRY_RUN=1   print the commands, one argument a line with an empty line between them, and run nothing
: "${PYTHON:=python}"
: "${NUM_GPUS:=}"
: "${DRY_RUN:=0}"
# PyTorch's launcher imports torch before it imports anything of lmm_r1, which hides this warning elsewhere.
export PYTHONWARNINGS="${PYTHONWARNINGS:+$PYTHONWARNINGS,}ignore:The pynvml package is deprecated:FutureWarning"
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/scripts/lmm_r1/reward_service.sh
source "$SCRIPTS/reward_service.sh"
# shellcheck source=examples/scripts/lmm_r1/gpus.sh
source "$SCRIPTS/gpus.sh"
# shellcheck source=examples/scripts/lmm_r1/supervised_stage.sh
source "$SCRIPTS/supervised_stage.sh"
# shellcheck source=examples/scripts/lmm_r1/rl_stage.sh
source "$SCRIPTS/rl_stage.sh"
SKIPPED_ROWS_CODE=3

stop_children() {
  local pid
  for pid in $(jobs -pr); do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  [[ -z $REWARD_FOLDER ]] || rm -rf "$REWARD_FOLDER"
}
trap stop_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# run COMMAND...: in the background and waited for, so that a signal to the script reaches the command at once.
run() {
  if [[ $DRY_RUN == 1 ]]; then
    printf '%s\n' "$@" ''
  else
    "$@" &
    wait "$!"
  fi
}

# run_on_rows COMMAND...: rows that it cannot use are listed and do not stop the script.
run_on_rows() {
  local code=0
  run "$@" || code=$?
  ((code == 0 || code == SKIPPED_ROWS_CODE)) || return "$code"
}

# stage FOLDER COMMAND...: nothing where FOLDER already holds a finished stage.
stage() {
  if [[ -f $1/stage.json ]]; then
    echo "skipping $1: it holds a finished stage" >&2
  else
    run "${@:2}"
  fi
}

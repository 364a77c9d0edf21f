# shellcheck shell=bash
# Sourced by run_curriculum.sh: which stages follow each other, and how one hands its model on.
: "${SCRIPTS:?chain.sh must be sourced after common.sh}"
: "${SFT_DATA:=}" "${SFT_CONFIG:=$SCRIPTS/configs/cold_start.yaml}"
: "${FRE_DATA:=}" "${FRE_CONFIG:=}" "${MGT_DATA:=}" "${MGT_CONFIG:=}"

# take_stages NAMES... FLAGS...: STAGES, the FOLDERS under ROOT that they write, and the FLAGS for all of them.
take_stages() {
  STAGES=() FOLDERS=()
  while (($#)) && [[ $1 != -* ]]; do
    local name=${1%.sh}
    name=${name#train_}
    if [[ ! -f $SCRIPTS/train_$name.sh ]]; then
      echo "run_curriculum.sh: no stage $1; known are $(known_stages)" >&2
      exit 2
    fi
    if [[ " ${STAGES[*]} " == *" $name "* ]]; then
      echo "run_curriculum.sh: the stage $1 is given twice; each has one folder under ROOT" >&2
      exit 2
    fi
    STAGES+=("$name") FOLDERS+=("$name")
    shift
  done
  # shellcheck disable=SC2034  # run_curriculum.sh reads them
  FLAGS=("$@")
  ((${#STAGES[@]})) || STAGES=(fre_text mgt_geo) FOLDERS=(fre mgt)
  : "${DATA_fre_text:=$FRE_DATA}" "${CONFIG_fre_text:=$FRE_CONFIG}"
  : "${DATA_mgt_geo:=$MGT_DATA}" "${CONFIG_mgt_geo:=$MGT_CONFIG}"
}

known_stages() {
  local found=("$SCRIPTS"/train_*.sh)
  found=("${found[@]##*/train_}")
  echo "${found[*]%.sh}"
}

# chained NAME FOLDER FLAGS...: one stage from MODEL into ROOT/FOLDER, which is the next MODEL.
chained() {
  local data=DATA_$1 config=CONFIG_$1 recipe=RECIPE_$1
  export PYTHON NUM_GPUS DRY_RUN MEMORY REWARD_URL DATA_FOLDER SOURCES
  MODEL=$MODEL OUTPUT=$ROOT/$2 DATA=${!data:-} CONFIG=${!config:-} RECIPE=${!recipe:-} \
    bash "$SCRIPTS/train_$1.sh" "${@:3}" &
  wait "$!"
  MODEL=$ROOT/$2
}

# cold_start: supervised training on SFT_DATA from MODEL into ROOT/cold_start.
cold_start() {
  DATA=$SFT_DATA CONFIG=$SFT_CONFIG OUTPUT=$ROOT/cold_start supervised_stage train_sft cold_start --train.seed "$SEED"
  MODEL=$ROOT/cold_start
}

# shellcheck shell=bash
# Sourced by reproduce_small.sh: the rows, the cold start and the arms of one seed, under ROOT.
: "${SCRIPTS:?source common.sh before claim.sh}"
: "${PROMPTS:=64}" "${STEPS:=24}" "${COLD_ROWS:=25600}" "${TEST_ROWS:=100}" "${LEVEL:=1}"
# Hidden size and layers, for millions of parameters.
declare -A SIZES=([10]='320 6' [30]='512 8' [100]='768 12' [300]='1280 14')
read -r HIDDEN LAYERS <<<"${SIZES[${SCALE:-none}]:-${HIDDEN:-128} ${LAYERS:-2}}"
TRAINED=(count relations dice bar_chart)
FAMILIES=("${TRAINED[@]}" compare cards line_chart)
# The two stages of each arm: modality, and steps of 24.
declare -A FIRST=([direct]='image 12' [fre_text]='text 12' [fre_multi]='mixed 12' [reversed]='image 12' [mixed]='mixed 12'
  [fre_25]='text 6' [fre_75]='text 18')
declare -A SECOND=([direct]='image 12' [fre_text]='image 12' [fre_multi]='image 12' [reversed]='text 12' [mixed]='mixed 12'
  [fre_25]='image 18' [fre_75]='image 6')
declare -A STAGES_OF=([text]=fre_text [mixed]=fre_multi [image]=direct_rl_geo)

# family_rows NAME FAMILY FLAGS...: the row folder ROOT/data/NAME/FAMILY, unless it is there already.
family_rows() {
  [[ -d $ROOT/data/$1/$2 ]] || run "$PYTHON" -m lmm_r1.cli.make_task "$2" --difficulty "$LEVEL" \
    --output "$ROOT/data/$1/$2" "${@:3}"
}

# from_cold_start: a random model of SEED, taught by worked solutions of all families, text and images.
from_cold_start() {
  local family folders=()
  for family in "${FAMILIES[@]}"; do
    family_rows solutions "$family" --modality mixed --rows "$((COLD_ROWS / ${#FAMILIES[@]}))" --seed "${SEED}0" --solutions
    folders+=("$ROOT/data/solutions/$family")
  done
  [[ -d $ROOT/tiny ]] || run "$PYTHON" -m lmm_r1.cli.make_tiny_model --arch qwen2_5_vl --hidden_size "$HIDDEN" \
    --layers "$LAYERS" --tasks "${FAMILIES[@]}" --seed "$SEED" --output "$ROOT/tiny"
  MODEL=$ROOT/tiny DATA=$(IFS=, && echo "${folders[*]}") CONFIG=$SCRIPTS/configs/demo/cold_start.yaml OUTPUT=$ROOT/cold_start \
    supervised_stage train_sft cold_start --train.seed "$SEED" --data.no_keep_order
}

# arm NAME FLAGS...: both stages of an arm from the cold start; MODEL is what they made.
arm() {
  local place=0 phase modality share family folders
  # shellcheck disable=SC2034  # `chained` reads and sets it
  MODEL=$ROOT/cold_start
  for phase in "${FIRST[$1]:?reproduce_small.sh: no arm $1}" "${SECOND[$1]}"; do
    read -r modality share <<<"$phase"
    place=$((place + 1)) folders=()
    local prompts=$((share * STEPS * PROMPTS / 24)) stage=${STAGES_OF[$modality]}
    for family in "${TRAINED[@]}"; do
      family_rows "$modality$place.$prompts" "$family" --modality "$modality" --rows "$((prompts / ${#TRAINED[@]}))" \
        --seed "$SEED$place"
      folders+=("$ROOT/data/$modality$place.$prompts/$family")
    done
    printf -v "DATA_$stage" %s "$(IFS=, && echo "${folders[*]}")"
    printf -v "CONFIG_$stage" %s "$SCRIPTS/configs/demo/mgt.yaml"
    chained "$stage" "$1/$place" --data.max_samples "$prompts" --rollout.batch_size "$PROMPTS" \
      --train.batch_size "$PROMPTS" --rollout.max_new_tokens 48 --train.seed "$SEED" "${@:2}"
  done
}

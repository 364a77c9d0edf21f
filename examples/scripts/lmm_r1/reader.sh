# shellcheck shell=bash
# Sourced by the loops that take a better model than the one they start from.
: "${SCRIPTS:?reader.sh must be sourced after loop.sh}"

# reader: ROOT/reader, the tiny cold start that went on, mostly with images, while its learning rate fell: it sees what the
# start does not.
reader() {
  rows more_solutions --modality mixed --image_share 0.75 --split train --rows 6400 --solutions --min-digits 2 --seed "1$SEED"
  MODEL=$ROOT/cold_start DATA=$ROOT/data/more_solutions CONFIG=$SFT_CONFIG OUTPUT=$ROOT/reader \
    supervised_stage train_sft reader --train.seed "$SEED" --lr_scheduler cosine_with_min_lr
}

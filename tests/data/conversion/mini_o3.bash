#!/usr/bin/env bash
# The settings of Mini-o3's training command, written down from its published ones.
set -euo pipefail
DATA=/data/minio3
TRAIN="$DATA/VisualProbe_train/train.json"
DEEPEYES="$DATA/DeepEyes_train_4K/train.json"

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files="[$TRAIN,$DEEPEYES]" \
  data.val_files="[$DATA/vstar_bench/val.json]" \
  data.system_prompt="tool_crop" \
  data.tool_call="crop" \
  data.train_batch_size=256 \
  data.max_prompt_length=8192 \
  data.max_response_length=8192 \
  data.image_key=images \
  data.answer_key=solution \
  data.acc_reward_weight=1.0 \
  data.max_pixels=2000000 \
  data.min_pixels=40000 \
  actor_rollout_ref.model.path=Mini-o3/Mini-o3-7B-SFT \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.ignore_exceed=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.3 \
  actor_rollout_ref.rollout.name=vllm_multi_turn_tool_call \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.max_generation_round=6 \
  'actor_rollout_ref.rollout.limit_mm_per_prompt={"image": 12}' \
  actor_rollout_ref.rollout.max_total_response_length=32768 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  reward_model.use_hybrid_reward_manager=True \
  trainer.rejection_sample=True \
  trainer.logger="[console,wandb]" \
  trainer.project_name=Mini-o3 \
  trainer.experiment_name=Mini-o3-RL \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=8 \
  trainer.save_freq=25 \
  trainer.test_freq=5 \
  trainer.default_local_dir=./save \
  trainer.total_epochs=100

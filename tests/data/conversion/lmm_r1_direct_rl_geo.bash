#!/bin/bash
# The settings of LMM-R1's train_direct_rl_geo.sh, written down from its published ones.
export WORKSPACE_DIR="$(pwd)"
export DATASET_PATH="${WORKSPACE_DIR}/MathV360k/geo_split.jsonl"
export PRETRAIN_MODEL_PATH="Qwen/Qwen2.5-VL-3B-Instruct"
export SAVE_PATH="./checkpoints/lmm-r1-direct-rl-geo"
export LOG_DIR="${SAVE_PATH}/logs/$(date +%Y%m%d_%H%M%S)"
mkdir -p "${LOG_DIR}"

# The server doesn't belong to the training command.
python -m openrlhf.models.remote_rm.math_verifier --dataset $DATASET_PATH --input_key message \
   --prompt-template chatml 2>&1 | tee -a "${LOG_DIR}/remote_rm.log" &
REMOTE_RM_PID=$!

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="{\"working_dir\": \"${WORKSPACE_DIR}\"}" \
   -- python -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 \
   --remote_rm_url http://127.0.0.1:5000/get_reward \
   --vllm_num_engines 8 --vllm_tensor_parallel_size 1 \
   --vllm_enable_sleep --vllm_gpu_memory_utilization 0.5 --vllm_sync_backend gloo \
   --colocate_all_models --enable_prefix_caching \
   --pretrain ${PRETRAIN_MODEL_PATH} \
   --save_path ${SAVE_PATH} \
   --micro_train_batch_size 2 --train_batch_size 256 \
   --micro_rollout_batch_size 2 --rollout_batch_size 256 \
   --temperature 1.0 --n_samples_per_prompt 16 \
   --max_epochs 1 --num_episodes 2 \
   --prompt_max_len 4096 --generate_max_len 4096 \
   --advantage_estimator gae \
   --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing \
   --actor_learning_rate 1e-6 \
   --init_kl_coef 0.001 \
   --prompt_data ${DATASET_PATH} --input_key message \
   --label_key answer \
   --lambd 1 --gamma 1 --max_samples 100000 --normalize_reward --save_hf_ckpt --ckpt_path ${SAVE_PATH}/ckpt \
   --load_checkpoint --wandb_group lmm-r1-training --use_tensorboard ${SAVE_PATH}/logs \
   --save_steps 20 \
   --use_wandb ${WANDB_API_KEY} --wandb_run_name direct_rl_geo > >(tee -a "${LOG_DIR}/train.log") 2>&1 &

TRAIN_PID=$!

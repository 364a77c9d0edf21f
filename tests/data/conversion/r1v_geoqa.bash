#!/bin/bash
# The settings of R1-V's run_grpo_vllm_qwen25vl.sh, written down from its published ones.
CUDA_VISIBLE_DEVICES="0,1,2,3,4" torchrun --nproc_per_node="4" --nnodes="1" src/open_r1/grpo.py --use_vllm true \
    --output_dir <OUTPUT_DIR> --model_name_or_path <MODEL> --dataset_name leonardPKU/GEOQA_R1V_Train_8K \
    --max_prompt_length 4096 --max_completion_length 2048 --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 --learning_rate 1e-6 --lr_scheduler_type "constant" --logging_steps 1 \
    --bf16 true --gradient_checkpointing true --attn_implementation flash_attention_2 \
    --min_pixels 3136 --max_pixels 501760 --num_train_epochs 2 --run_name geoqa --save_steps 200 \
    --save_total_limit 3 --save_only_model true --report_to wandb --temperature 1.0 --num_generations 8 \
    --vllm_device "cuda:4" --vllm_gpu_memory_utilization 0.8 --deepspeed local_scripts/zero1_no_optimizer.json

"""Values of flags that would have no effect are refused by name, with what to take instead."""

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit

RL = {
    "actor.model_name_or_path": "model",
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "data.prompt_dataset": "rows.jsonl",
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.n_samples_per_prompt": 8,
}
SFT = {"model.model_name_or_path": "model", "data.dataset": "rows.jsonl"}
LORA = {"ds.lora.rank": 8}
REFUSED_IN_RL = [
    ({"ds.load_in_4bit": True}, "give --ds.lora.rank for adapters on them"),
    (
        {"ds.load_in_4bit": True, **LORA, "ds.zero_stage": 3},
        "take --ds.zero_stage 2, with which each GPU has all of them",
    ),
    (
        {"ds.load_in_4bit": True, **LORA, "ds.tensor_parallel_size": 2},
        "--ds.tensor_parallel_size 2: a layer in 4 bits",
    ),
    (
        {"ds.load_in_4bit": True, **LORA, "ds.deepcompile": True},
        "and --ds.deepcompile: layers in 4 bits are not compiled",
    ),
    ({"ds.load_in_4bit": True, **LORA, "ds.use_universal_ckpt": True}, "and --ds.use_universal_ckpt: universal"),
    ({"ds.image_cache_gib": -1.0}, "must be 0 or more; 0 keeps nothing"),
    ({"ds.lora.use_dora": True}, "is a kind of LoRA; give --ds.lora.rank, too"),
    ({"ds.lora.use_rslora": True}, "is a kind of LoRA; give --ds.lora.rank, too"),
    ({"actor.optim": "adamw_8bit", "ds.adam_offload": True}, "take --actor.optim adam with it"),
    ({"critic.optim": "adamw_8bit", "ds.zero_stage": 0}, "is for --ds.zero_stage 1, 2 and 3"),
    (
        {"actor.optim": "paged_adamw_8bit", "ds.enable_sleep": True},
        "and --ds.enable_sleep: DeepSpeed moves only the state",
    ),
    (
        {"actor.gradient_checkpointing_layers": 2},
        "has no effect without --actor.gradient_checkpointing_enable; give both",
    ),
    (
        {"actor.gradient_checkpointing_layers": 0, "actor.gradient_checkpointing_enable": True},
        "--actor.gradient_checkpointing_layers 0 must be at least 1",
    ),
    ({"train.async_queue_size": 2}, "give --train.async_enable, too"),
    ({"train.partial_rollout_enable": True}, "give --train.async_enable, too"),
    ({"train.async_enable": True, "train.async_queue_size": 0}, "--train.async_queue_size 0 must be at least 1"),
    ({"train.async_enable": True, "train.colocate_all": True}, "take turns on the same GPUs; leave one of them out"),
    ({"train.async_enable": True, "ds.enable_sleep": True}, "--ds.enable_sleep frees the policy's memory"),
    ({"rollout.oversample": 0.9}, "--rollout.oversample 0.9 must be between 1, "),
    ({"rollout.oversample": 2.1}, "would not all find room in the next step"),
    (
        {"rollout.oversample": 1.5, "rollout.oversample_max_held": 0},
        "--rollout.oversample_max_held 0 must be at least 1",
    ),
    ({"rollout.oversample_max_held": 2}, "bounds how long groups are held over; give --rollout.oversample, too"),
    ({"rollout.oversample": 1.5, "train.async_enable": True}, "and --train.async_enable generates on, with ages that"),
    (
        {"rollout.oversample": 1.5, "rollout.batch_size": 32, "rollout.vllm_generate_batch_size": 16},
        "--rollout.vllm_generate_batch_size 16 fewer; leave one of them out",
    ),
    ({"vllm.speculative_method": "suffix"}, "says how tokens are guessed; give --vllm.speculative_tokens, too"),
    ({"train.ema_beta": 0.5}, "has no part without --train.enable_ema"),
    ({"train.ema_beta": 1.0, "train.enable_ema": True}, "must be above 0 and below 1"),
    ({"train.enable_ema": True, "ds.zero_stage": 0}, "take 1, 2 or 3"),
    ({"train.enable_ema": True, "ds.use_universal_ckpt": True}, "holds no moving average"),
    ({"ref.refresh_steps": -1}, "must be at least 1, or 0"),
    ({"ref.refresh_steps": 2, "algo.kl.init_coef": 0.0}, "there is no reference model"),
    ({"ref.refresh_steps": 2, "ds.load_in_4bit": True, **LORA}, "the reference is in 4 bits"),
    (
        {
            "ref.refresh_steps": 2,
            "ds.tensor_parallel_size": 2,
            "actor.num_gpus_per_node": 2,
            "ref.num_gpus_per_node": 2,
        },
        "no rank has the policy's weights whole",
    ),
    (
        {"ref.during_generation": True, "algo.kl.init_coef": 0.0},
        "--ref.during_generation: with --algo.kl.init_coef 0 there is no reference model; leave it out",
    ),
    (
        {"ref.during_generation": True, "train.async_enable": True, "train.colocate_actor_ref": True},
        "the policy is updated during generation, on the GPUs of the reference",
    ),
    (
        {"ref.during_generation": True, "train.async_enable": True, "ref.refresh_steps": 2},
        "the next rollout begins before the reference is refreshed",
    ),
    ({"actor.optim": "muon", "ds.param_dtype": "fp16"}, "--actor.optim muon with --ds.param_dtype fp16: DeepSpeed"),
    ({"data.curriculum": "easy_first"}, "--train.num_episodes 1 must be at least 2"),
    ({"data.dataloader_num_workers": 2}, "in RL all rows are read before the first step"),
    ({"rollout.top_k": 0}, "must be at least 1, or -1 for all tokens"),
    ({"eval.dataset": "rows.jsonl"}, "is never evaluated on with --eval.steps -1"),
    ({"eval.steps": 5}, "has nothing to evaluate on; give --eval.dataset"),
    ({"eval.before_training": True}, "--eval.before_training has nothing to evaluate on; give --eval.dataset"),
    ({"actor.muon.ns_steps": 0}, "must be at least 1"),
    ({"actor.min_lr_ratio": 0.5, "actor.lr_scheduler": "linear"}, "has no part in --actor.lr_scheduler linear"),
    ({"actor.lr_scheduler": "greedy"}, "is not one of constant, constant_with_warmup, linear, cosine,"),
    ({"critic.lr_scheduler": "cosin"}, "is not one of constant, constant_with_warmup, linear, cosine,"),
    ({"actor.lr_warmup_ratio": 1.5}, "--actor.lr_warmup_ratio 1.5 must be between 0 and 1"),
    ({"critic.lr_warmup_ratio": -0.1}, "--critic.lr_warmup_ratio -0.1 must be between 0 and 1"),
    ({"actor.adam.lr": -1e-6}, "--actor.adam.lr -1e-06 must not be negative"),
    ({"actor.muon.lr": -0.1, "actor.optim": "muon"}, "--actor.muon.lr -0.1 must not be negative"),
    (
        {"actor.lr_scheduler": "polynomial", "actor.adam.lr": 1e-7},
        "ends at 1e-07, which --actor.adam.lr 1e-07 must be above; take linear",
    ),
    ({"ref.offload": True}, "add --ds.zero_stage 3"),
    ({"reward.offload": True}, "add --ds.zero_stage 3"),
    ({"actor.policy_loss_type": "sapo", "actor.eps_clip": 0.1}, "has no part in --actor.policy_loss_type sapo"),
    ({"actor.policy_loss_type": "sapo", "actor.eps_clip_low_high": (0.2, 0.3)}, "which clips nothing"),
    ({"actor.policy_loss_type": "sapo", "actor.dual_clip": 3.0}, "--actor.dual_clip has no part in"),
    ({"actor.policy_loss_type": "cispo", "actor.dual_clip": 3.0}, "has no part in --actor.policy_loss_type cispo"),
    ({"actor.dual_clip": 1.0}, "must be above 1"),
    ({"actor.eps_clip": -0.1}, "must not be negative"),
    ({"actor.sapo_temperature_pos": 2.0}, "has no part in --actor.policy_loss_type ppo"),
    ({"actor.sapo_temperature_neg": 0.0, "actor.policy_loss_type": "sapo"}, "must be above 0"),
    ({"actor.loss_agg_length": 100}, "has no part in --actor.loss_agg_mode token-mean"),
    ({"actor.loss_agg_length": 0, "actor.loss_agg_mode": "seq-mean-token-sum-norm"}, "must be at least 1"),
    ({"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.policy_loss_type": "gspo"}, "take seq-mean-token-mean"),
    (
        {"algo.advantage.is_correction_threshold": (2.0, 0.5), "algo.advantage.is_correction_level": "token"},
        "the first must not be above the second",
    ),
    (
        {"algo.advantage.is_correction_gating": "tv", "algo.advantage.is_correction_level": "token"},
        "has only an upper bound",
    ),
    (
        {
            "algo.advantage.is_correction_mode": "clip",
            "algo.advantage.is_correction_level": "seq",
            "algo.advantage.is_correction_gating": "tv",
            "algo.advantage.is_correction_threshold": (0.1,),
        },
        "take mask",
    ),
    ({"algo.advantage.pass_k": 2}, "is for --algo.advantage.estimator grpo_passk"),
    ({"algo.advantage.pass_k": 0, "algo.advantage.estimator": "grpo_passk"}, "must be at least 1"),
    ({"algo.advantage.estimator": "grpo_passk", "algo.advantage.pass_k": 8}, "samples_per_prompt 8 must be more"),
    (
        {"rollout.temperature": 0.0},
        "--rollout.temperature 0 must be above 0: the policy gradient needs sampled responses",
    ),
    ({"rollout.temperature": -1.0}, "--rollout.temperature -1 must be above 0"),
    ({"rollout.temperature": float("nan")}, "--rollout.temperature nan must be above 0"),
    (
        {"algo.advantage.estimator": "remax", "reward.model_name_or_path": "rm", "reward.remote_url": None},
        "serve it with lmm-r1 serve_rm",
    ),
    ({"algo.advantage.estimator": "remax", "train.agent_func_path": "agent.py"}, "samples as it likes"),
]
REFUSED_IN_SFT = [
    ({"eval.steps": 5}, "has nothing to evaluate on; give --eval.dataset"),
    ({"eval.before_training": True}, "--eval.before_training has nothing to evaluate on; give --eval.dataset"),
    ({"eval.verifier": "math"}, "has no rows to judge answers to; give --eval.dataset"),
    ({"eval.verifier": "maths", "eval.dataset": "e"}, "--eval.verifier maths: "),
    ({"eval.verifier": "math", "eval.dataset": "e", "ds.zero_stage": 3}, "no rank has the whole model"),
    ({"eval.verifier": "math", "eval.dataset": "e", "ds.tensor_parallel_size": 2}, "no rank has the whole model"),
    ({"eval.verifier": "math", "eval.dataset": "e", "eval.max_new_tokens": 0}, "must be at least 1"),
    ({"ckpt.best_metric_key": "loss", "eval.dataset": "e"}, "names no metric of an evaluation"),
    ({"ckpt.best_metric_key": "eval_loss"}, "names no metric of an evaluation; give --eval.dataset"),
    ({"ds.load_in_4bit": True}, "--ds.load_in_4bit: weights in 4 bits are not trained; give --ds.lora.rank"),
    (
        {"ds.load_in_4bit": True, **LORA, "ds.zero_stage": 3},
        "--ds.load_in_4bit: DeepSpeed cannot share weights in 4 bits",
    ),
    ({"ds.lora.use_dora": True}, "--ds.lora.use_dora is a kind of LoRA; give --ds.lora.rank, too"),
    ({"optim": "adamw_8bit", "ds.adam_offload": True}, "--optim adamw_8bit and --ds.adam_offload: DeepSpeed keeps"),
    ({"optim": "muon", "adam.vision_lr": 1e-4}, "--adam.vision_lr 0.0001 needs --optim adam"),
    ({"data.input_template": "Q: {}"}, "name it with --data.output_key"),
    (
        {"data.input_template": "Q: {}", "data.output_key": "a", "data.apply_chat_template": True},
        "both write the text around a prompt",
    ),
    ({"model.pretrain_mode_enable": True, "data.input_template": "Q: {}"}, "a column of text is used as it is"),
    ({"model.pretrain_mode_enable": True, "data.apply_chat_template": True}, "a column of text is used as it is"),
    ({"model.pretrain_mode_enable": True, "data.multiturn": False}, "every token counts; leave one out"),
    ({"min_lr_ratio": 0.5, "lr_scheduler": "linear"}, "--min_lr_ratio 0.5 has no part in --lr_scheduler linear"),
]


def case(changes: dict[str, object]) -> str:
    return " ".join(changes)


@pytest.mark.parametrize(("changes", "instead"), REFUSED_IN_RL, ids=[case(changes) for changes, _ in REFUSED_IN_RL])
def test_what_has_no_effect_in_rl_is_refused(changes, instead):
    with pytest.raises(UserError) as refused:
        resolve(dotted.replace(PPOConfig(), RL | changes))
    assert f"--{next(iter(changes))}" in str(refused.value)
    assert instead in str(refused.value)


@pytest.mark.parametrize(("changes", "instead"), REFUSED_IN_SFT, ids=[case(changes) for changes, _ in REFUSED_IN_SFT])
def test_what_has_no_effect_in_supervised_training_is_refused(changes, instead):
    with pytest.raises(UserError) as refused:
        resolve(dotted.replace(SFTConfig(), SFT | changes))
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.output_key": "a"},
        {"ds.load_in_4bit": True, **LORA, "ds.lora.use_dora": True, "optim": "adamw_8bit", "adam.vision_lr": 1e-4},
        {"ds.use_liger_kernel": True},
        {"data.output_key": "a", "data.input_template": "Q: {}"},
        {"data.output_key": "a", "data.apply_chat_template": True},
        {"model.pretrain_mode_enable": True},
        {"model.pretrain_mode_enable": True, "data.output_key": "a", "data.input_template": "Q: {}"},
        {"eval.dataset": "e"},
        {"eval.dataset": "e", "eval.verifier": "list:unordered", "ckpt.best_metric_key": "eval_default_pass1"},
    ],
    ids=case,
)
def test_what_goes_together_is_taken(changes):
    resolve(dotted.replace(SFTConfig(), SFT | changes))

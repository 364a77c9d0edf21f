"""Refusals of a supervised trainer's flags that contradict each other, before anything starts."""

from lmm_r1.config.checks import TWO_TEMPLATES, check_accumulation, check_aux_loss, check_ulysses, require
from lmm_r1.config.model_checks import check_adapters, check_eight_bit, check_fp16_optimizer, check_schedule
from lmm_r1.config.preferences import LOSS_TYPES, DPOConfig, RMConfig, RMModelConfig
from lmm_r1.config.rewards import check_reward
from lmm_r1.config.supervised import KDConfig, SFTConfig, SupervisedConfig, SupervisedDataConfig
from lmm_r1.errors import UserError


def check_sft(config: SFTConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    _check_supervised(config)
    _check_plain_text(config)
    _check_answers(config)
    _check_best_metric(config, metrics="eval_loss (or eval_DATASOURCE_pass1 with --eval.reward)")
    check_ulysses(config.ds, packs=config.ds.packing_samples, gpus={})


def check_dpo(config: DPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in but the reference."""
    _check_supervised(config)
    _check_reference(config)
    _check_prompt_texts(config.data, key=config.data.prompt_key, flag="--data.prompt_key")
    _check_best_metric(config, metrics="eval_loss or eval_pair_accuracy")
    check_ulysses(config.ds, packs=config.ds.packing_samples or config.train.shared_prefix_enable, gpus={})


def check_kd(config: KDConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    require(config, "teacher.model_name_or_path", example="path/or/hub-name")
    check_sft(config)
    _check_own_responses(config)
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"--ds.tensor_parallel_size {config.ds.tensor_parallel_size} would split the output layers whose distributions "
            "are compared; take --ds.zero_stage 3"
        )


def check_rm(config: RMConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    _check_supervised(config)
    _check_reward_loss(config.model)
    _check_prompt_texts(config.data, key=config.data.prompt_key, flag="--data.prompt_key")
    _check_best_metric(config, metrics="eval_loss or eval_pair_accuracy")
    check_ulysses(config.ds, packs=config.ds.packing_samples or config.train.shared_prefix_enable, gpus={})
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"--ds.tensor_parallel_size {config.ds.tensor_parallel_size} would split the value head of a reward model; "
            "leave it out"
        )


def _check_supervised(config: SupervisedConfig) -> None:
    check_accumulation(config)
    check_adapters(config.ds)
    check_eight_bit(config, config.ds, prefix="")
    check_schedule(config, prefix="")
    check_fp16_optimizer(config, config.ds, prefix="")
    check_aux_loss(config.model, prefix="model.")


def _check_answers(config: SFTConfig) -> None:
    asked = config.eval
    if asked.reward is not None:
        check_reward(asked.reward, flag="--eval.reward")
        splits = config.ds.zero_stage == 3 or config.ds.tensor_parallel_size > 1
        if splits:
            name = "zero_stage" if config.ds.zero_stage == 3 else "tensor_parallel_size"
            raise UserError(
                f"--eval.reward {asked.reward}: with --ds.{name} {getattr(config.ds, name)} no rank has the whole model "
                "to generate answers with; take --ds.zero_stage 2, or judge checkpoints with lmm-r1 evaluate"
            )


def _check_best_metric(config: SupervisedConfig, *, metrics: str) -> None:
    key = config.ckpt.best_metric_key
    if key not in ("", "none") and (config.eval.dataset is None or not key.startswith("eval_")):
        raise UserError(
            f"--ckpt.best_metric_key {key} names no metric of an evaluation; give --eval.dataset and {metrics}, or none"
        )


def _check_plain_text(config: SFTConfig) -> None:
    data, pretrains = config.data, config.model.pretrain_mode_enable
    own_template = bool(data.input_template) and data.input_template != type(data)().input_template
    if own_template and data.apply_chat_template:
        raise UserError(TWO_TEMPLATES.format(data.input_template))
    if own_template and not pretrains and data.output_key is None:
        raise UserError(
            f"--data.input_template {data.input_template!r} is for a plain-text prompt, whose response is in a column of "
            "its own; name it with --data.output_key"
        )
    if pretrains and data.output_key is None and (own_template or data.apply_chat_template):
        given = "--data.input_template" if own_template else "--data.apply_chat_template"
        raise UserError(
            f"{given}: with --model.pretrain_mode_enable a column of text is used as it is; leave one out, or name "
            "the column with responses by --data.output_key"
        )
    if pretrains and not data.multiturn:
        raise UserError("--data.no_multiturn: with --model.pretrain_mode_enable every token counts; leave one out")


def _check_own_responses(config: KDConfig) -> None:
    if not config.rollout.on_policy_share:
        return
    share = f"--rollout.on_policy_share {config.rollout.on_policy_share:g}"
    if config.ds.ulysses_size > 1:
        raise UserError(
            f"{share}: ranks that share sequences would each sample others; leave --ds.ulysses_size out, or sample in rounds "
            "with lmm-r1 batch_inference"
        )
    if config.data.dataloader_num_workers:
        raise UserError(f"{share} has no rows to encode ahead; leave --data.dataloader_num_workers out")
    if config.model.pretrain_mode_enable:
        raise UserError(f"{share} has no prompts with --model.pretrain_mode_enable; leave one of them out")


def _check_reference(config: DPOConfig) -> None:
    if config.ref.offload and config.refers_to_base:
        raise UserError(
            "--ref.offload: with --ds.lora.rank the reference is the model without its adapter, and no second one is "
            "loaded; leave it out"
        )


def _check_reward_loss(model: RMModelConfig) -> None:
    if model.loss_type not in LOSS_TYPES:
        raise UserError(
            f"--model.loss_type {model.loss_type}: known are {' and '.join(LOSS_TYPES)}; OpenRLHF's other loss, logexp, is "
            "sigmoid in another form"
        )
    if model.aux_loss_coef:
        raise UserError(
            f"--model.aux_loss_coef {model.aux_loss_coef:g} is not available for reward models; leave it out"
        )


def _check_prompt_texts(data: SupervisedDataConfig, *, key: str | None, flag: str) -> None:
    if not data.input_template:
        return
    if data.apply_chat_template:
        raise UserError(TWO_TEMPLATES.format(data.input_template))
    if key is None:
        raise UserError(
            f"--data.input_template {data.input_template!r} is for a plain-text prompt; name its column with {flag}"
        )

"""Conversion of verl's SFT trainers (`verl.trainer.fsdp_sft_trainer`, `verl.trainer.sft_trainer`)."""

from __future__ import annotations

from collections.abc import Iterator

from lmm_r1.migrate.table import TRACKERS, Flag, Given, Note, Table, ruled, to, without

_SCHEDULES = {"cosine": "cosine_with_min_lr", "wsd": "cosine_with_min_lr", "constant": "constant_with_warmup"}


def _files(given: Given) -> Iterator[Flag | Note]:
    files = given["data.train_files"]
    if files:
        yield Flag("data.dataset", ",".join(map(str, files)) if isinstance(files, list) else files)
    held_out, every = given["data.val_files"], given.whole("trainer.test_freq")
    if held_out:
        yield Flag("eval.dataset", ",".join(map(str, held_out)) if isinstance(held_out, list) else held_out)
        yield Flag("eval.steps", every)


def _columns(given: Given) -> Iterator[Flag | Note]:
    if given["data.multiturn.enable"]:
        yield Flag("data.input_key", given["data.multiturn.messages_key"])
        return
    if given.has("data.messages_key"):
        yield Flag("data.input_key", given["data.messages_key"])
    if given.has("data.prompt_key"):
        yield Flag("data.input_key", given["data.prompt_key"])
    if given.has("data.response_key"):
        yield Flag("data.output_key", given["data.response_key"])
    for name in ("data.prompt_dict_keys", "data.response_dict_keys"):
        if keys := given[name]:
            inner = ".".join(map(str, keys)) if isinstance(keys, list) else keys
            of = name.replace("dict_keys", "key")
            yield Flag("data.input_key" if "prompt" in name else "data.output_key", f"{given[of]}.{inner}")


def _optimizer(given: Given) -> Iterator[Flag | Note]:
    if (most := given["data.train_max_samples"]) is not None and given.whole("data.train_max_samples") > 0:
        yield Flag("data.max_samples", most)
    yield Flag("lr_scheduler", _SCHEDULES.get(str(given["optim.lr_scheduler"]), "cosine_with_min_lr"))
    rank = given.whole("model.lora_rank")
    if rank:
        yield Flag("ds.lora.rank", rank)
        yield Flag("ds.lora.alpha", given.whole("model.lora_alpha"))
        modules = given["model.target_modules"]
        yield Flag("ds.lora.target_modules", modules if isinstance(modules, list) else [modules])


def _records(given: Given) -> Iterator[Flag | Note]:
    logger = given["trainer.logger"]
    names = logger if isinstance(logger, (list, tuple)) else [logger]
    yield Flag("logger.trackers", [name for name in names if name in TRACKERS])


VERL_SFT = Table(
    system="verl",
    command="train_sft",
    settings=(
        to("model.partial_pretrain", "model.model_name_or_path"),
        ruled("data.train_files"),
        ruled("data.val_files"),
        ruled("data.prompt_key", "question"),
        ruled("data.response_key", "answer"),
        ruled("data.prompt_dict_keys"),
        ruled("data.response_dict_keys"),
        ruled("data.messages_key"),
        ruled("data.train_max_samples"),
        to("data.image_key", "data.image_key"),
        to("data.image_min_pixels", "data.min_pixels"),
        to("data.image_max_pixels", "data.max_pixels"),
        to("optim.min_lr_ratio", "min_lr_ratio"),
        to("trainer.max_ckpt_to_keep", "ckpt.max_num"),
        without("data.use_dynamic_bsz", "a pass has --train.micro_batch_size rows", False),
        without("data.max_token_len_per_gpu", "a pass has --train.micro_batch_size rows", None),
        without("model.freeze_vision_tower", "--model.freeze_prefix names what is not trained", False),
        ruled("data.multiturn.enable", False),
        ruled("data.multiturn.messages_key", "messages"),
        to("data.max_length", "data.max_len", default=1024),
        to("data.train_batch_size", "train.batch_size", default=256),
        to("data.micro_batch_size_per_gpu", "train.micro_batch_size", default=4),
        without(
            "data.truncation", "rows that are too long are reported; --data.bad_rows skip leaves them out", "error"
        ),
        to("model.enable_gradient_checkpointing", "model.gradient_checkpointing_enable", default=True),
        to("model.trust_remote_code", "train.trust_remote_code", default=False),
        to("model.use_liger", "ds.use_liger_kernel"),
        ruled("model.lora_rank", 0),
        ruled("model.lora_alpha", 16),
        ruled("model.target_modules", "all-linear"),
        without("model.strategy", "weights are sharded by DeepSpeed (--ds.zero_stage), not FSDP", "fsdp2"),
        without("model.fsdp_config.model_dtype", "--ds.param_dtype is the precision of passes", "fp32"),
        without("model.fsdp_config.cpu_offload", "--ds.adam_offload keeps the optimizer's state in CPU memory", False),
        to("ulysses_sequence_parallel_size", "ds.ulysses_size"),
        to("use_remove_padding", "ds.packing_samples"),
        to("optim.lr", "adam.lr", default=1e-5),
        to("optim.betas", "adam.betas", default=(0.9, 0.95)),
        to("optim.weight_decay", "adam.weight_decay", default=0.01),
        to("optim.warmup_steps_ratio", "lr_warmup_ratio", default=0.1),
        to("optim.clip_grad", "max_norm", default=1.0),
        ruled("optim.lr_scheduler", "cosine"),
        to("trainer.default_local_dir", "ckpt.output_dir"),
        to("trainer.project_name", "logger.wandb.project"),
        to("trainer.experiment_name", "logger.wandb.run_name"),
        to("trainer.total_epochs", "train.max_epochs", default=4),
        to("trainer.total_training_steps", "train.max_steps"),
        to("trainer.save_freq", "ckpt.save_steps"),
        ruled("trainer.test_freq", -1),
        ruled("trainer.logger", ("console",)),
        to("trainer.seed", "train.seed"),
        without("trainer.default_hdfs_dir", "the run folder is in a file system", None),
        without("trainer.n_gpus_per_node", "torchrun or --num_gpus of `deepspeed` gives the number of GPUs", 8),
        without("trainer.nnodes", "torchrun or --num_nodes of `deepspeed` gives the number of machines", 1),
    ),
    rules=(_files, _columns, _optimizer, _records),
    names={
        "model.path": "model.partial_pretrain",
        "model.use_remove_padding": "use_remove_padding",
        "optim.warmup_style": "optim.lr_scheduler",
        "optim.lr_scheduler_type": "optim.lr_scheduler",
        "optim.lr_warmup_steps_ratio": "optim.warmup_steps_ratio",
        "data.micro_batch_size": "data.micro_batch_size_per_gpu",
        "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    },
)

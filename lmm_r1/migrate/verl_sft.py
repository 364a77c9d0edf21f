"""Conversion of verl's SFT trainers (`verl.trainer.fsdp_sft_trainer`, `verl.trainer.sft_trainer`)."""

from __future__ import annotations

from lmm_r1.migrate.table import Flag, Given, Results, Table, names_of, settings_of, trackers

_SCHEDULES = {"cosine": "cosine_with_min_lr", "wsd": "cosine_with_min_lr", "constant": "constant_with_warmup"}


def _files(given: Given) -> Results:
    files = given["data.train_files"]
    if files:
        yield Flag("data.dataset", ",".join(map(str, files)) if isinstance(files, list) else files)
    held_out, every = given["data.val_files"], given.whole("trainer.test_freq")
    if held_out:
        yield Flag("eval.dataset", ",".join(map(str, held_out)) if isinstance(held_out, list) else held_out)
        yield Flag("eval.steps", every)


def _columns(given: Given) -> Results:
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


def _optimizer(given: Given) -> Results:
    if (most := given["data.train_max_samples"]) is not None and given.whole("data.train_max_samples") > 0:
        yield Flag("data.max_samples", most)
    yield Flag("lr_scheduler", _SCHEDULES.get(str(given["optim.lr_scheduler"]), "cosine_with_min_lr"))
    rank = given.whole("model.lora_rank")
    if rank:
        yield Flag("ds.lora.rank", rank)
        yield Flag("ds.lora.alpha", given.whole("model.lora_alpha"))
        modules = given["model.target_modules"]
        yield Flag("ds.lora.target_modules", modules if isinstance(modules, list) else [modules])


def _records(given: Given) -> Results:
    yield from trackers(given, "trainer.logger", "console", "file")


VERL_SFT = Table(
    system="verl",
    command="train_sft",
    settings=settings_of("verl_sft"),
    rules=(_files, _columns, _optimizer, _records),
    names=names_of("verl_sft_names"),
)

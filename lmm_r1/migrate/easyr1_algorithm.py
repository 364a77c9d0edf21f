"""What EasyR1's settings of the algorithm and the optimizer are here: other units, other names for the same values."""

from __future__ import annotations

import math

from lmm_r1.errors import UserError
from lmm_r1.migrate.table import Flag, Given, Results, Rule, derived, differs, idle, lacks, names_of

ESTIMATORS, NEAREST_ESTIMATORS = names_of("estimators"), names_of("nearest_estimators")
"""Ours by theirs, and with their difference those that are only near."""
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_TYPES = names_of("loss_types")
TEMPERATURES = {
    "worker.actor.tau_positive": "actor.sapo_temperature_pos",
    "worker.actor.tau_negative": "actor.sapo_temperature_neg",
}
LOSS_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}
MAX_TRIES = 20
"""Batches that a step may take if `trainer.max_try_make_batch` is not given."""
SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}


def longest_sample(given: Given) -> int:
    """Return the tokens of the longest sample, prompt and response together."""
    return given.whole("data.max_prompt_length") + given.whole("data.max_response_length")


def batches(given: Given, *, longest: int | None = None) -> Results:
    """Samples of an update, and those of a pass or its tokens.

    Args:
        longest: tokens of the longest sample, if not `longest_sample`.
    """
    prompts, samples = given.whole("worker.actor.global_batch_size"), given.whole("worker.rollout.n")
    yield Flag("train.batch_size", prompts * samples)
    yield derived(
        "worker.actor.global_batch_size",
        f"it counts prompts, --train.batch_size counts samples: {prompts} x worker.rollout.n {samples} = "
        f"{prompts * samples}",
    )
    packs, fills = given.switch("worker.actor.padding_free"), given.switch("worker.actor.dynamic_batching")
    yield Flag("ds.packing_samples", packs or fills)
    yield Flag("train.dynamic_batch_enable", fills)
    if not fills:
        return
    longest = longest_sample(given) if longest is None else longest
    for setting, flag in (
        ("worker.actor.micro_batch_size_per_device_for_update", "train.max_tokens_per_gpu"),
        ("worker.actor.micro_batch_size_per_device_for_experience", "rollout.max_tokens_per_gpu"),
    ):
        micro = given.whole(setting)
        yield Flag(flag, micro * longest)
        yield derived(
            setting,
            f"with dynamic batching a pass holds as many tokens as {micro} of the longest samples: {micro * longest}",
        )
    if not packs:
        yield differs("worker.actor.padding_free", "dynamic batches hold packed sequences here")


def _estimator(given: Given) -> Results:
    name = given.text("algorithm.adv_estimator") or ""
    if name in ESTIMATORS:
        yield Flag("algo.advantage.estimator", ESTIMATORS[name])
        return
    if name not in NEAREST_ESTIMATORS:
        raise UserError(
            f"algorithm.adv_estimator {name!r} is none that is known here; known are "
            f"{', '.join((*ESTIMATORS, *NEAREST_ESTIMATORS))}"
        )
    nearest, difference = NEAREST_ESTIMATORS[name]
    yield Flag("algo.advantage.estimator", nearest)
    yield lacks(
        "algorithm.adv_estimator", f"{name} is not here as it is there; {nearest} is the nearest: {difference}"
    )


def kl_estimator(given: Given, setting: str, *, other: str) -> Results:
    """Yield the estimator that a setting names; another one for a name that is not known."""
    penalty = given.text(setting) or "kl"
    yield Flag("algo.kl.estimator", KL_ESTIMATORS.get(penalty, other))
    if penalty not in KL_ESTIMATORS:
        yield lacks(setting, f"{penalty}; --algo.kl.estimator has {', '.join(KL_ESTIMATORS)}")


def _kl(given: Given) -> Results:
    if given.switch("algorithm.disable_kl"):
        yield Flag("algo.kl.init_coef", 0.0)
        return
    yield Flag("algo.kl.init_coef", given.number("algorithm.kl_coef"))
    as_loss = given.switch("algorithm.use_kl_loss")
    yield Flag("algo.kl.use_loss", as_loss)
    # Two estimators are not here: k1 without its sign, and the quantity that k1 estimates.
    yield from kl_estimator(given, "algorithm.kl_penalty", other="k2" if as_loss else "k1")
    adaptive = given.text("algorithm.kl_type") == "adaptive"
    if adaptive and not as_loss:
        yield Flag("algo.kl.target", given.number("algorithm.kl_target"))
        yield Flag("algo.kl.horizon", given.whole("algorithm.kl_horizon"))
        return
    if adaptive:
        yield lacks("algorithm.kl_type", "only a KL penalty in the reward has an adaptive weight")
    yield from idle(
        given,
        "belongs to a KL penalty in the reward with an adaptive weight",
        "algorithm.kl_target",
        "algorithm.kl_horizon",
    )


def _filter(given: Given) -> Results:
    enabled = given.switch("algorithm.online_filtering")
    yield Flag("algo.dynamic_filtering_enable", enabled)
    low, high = given.number("algorithm.filter_low"), given.number("algorithm.filter_high")
    yield Flag("algo.dynamic_filtering_range", [low, high])
    key = given.text("algorithm.filter_key")
    if enabled:
        if key != "overall":
            yield Flag("algo.dynamic_filtering_part", key)
        yield Flag("algo.dynamic_filtering_max_batches", most_batches(given, "trainer.max_try_make_batch"))
        return
    if key != "overall":
        yield lacks("algorithm.filter_key", "nothing is filtered without online_filtering")
    if given.whole("trainer.max_try_make_batch") != MAX_TRIES:
        yield lacks("trainer.max_try_make_batch", "nothing is filtered without online_filtering")


def most_batches(given: Given, setting: str, *, multiplier: float = 1.0) -> int:
    """Return how many rollout batches have as many prompts as may be tried there, in batches that may be larger.

    Args:
        setting: says how many of those there may be.
        multiplier: by which they are larger than their size says.
    """
    step, batches = given.whole("data.rollout_batch_size"), given.whole(setting)
    size = step if given["data.mini_rollout_batch_size"] is None else given.whole("data.mini_rollout_batch_size")
    return math.ceil(max(0, batches) * size * multiplier / step)


def _loss(given: Given) -> Results:
    kind = given.text("worker.actor.loss_type") or ""
    yield Flag("actor.policy_loss_type", LOSS_TYPES.get(kind, "ppo"))
    if kind not in LOSS_TYPES:
        yield lacks(
            "worker.actor.loss_type",
            f"{kind} is not here, and ppo is written in its place: look at --actor.eps_clip_low_high, which was meant "
            f"for {kind}",
        )
    yield from _gate(given) if kind == "sapo" else _clip(given, kind=kind)
    mean = given.text("worker.actor.loss_avg_mode") or ""
    if mean not in LOSS_MEANS:
        raise UserError(f"worker.actor.loss_avg_mode {mean!r} must be one of {', '.join(LOSS_MEANS)}")
    yield Flag("actor.loss_agg_mode", LOSS_MEANS[mean])


def _clip(given: Given, *, kind: str) -> Results:
    """The bounds of ratios, and of losses if there is one."""
    yield Flag(
        "actor.eps_clip_low_high",
        [given.number("worker.actor.clip_ratio_low"), given.number("worker.actor.clip_ratio_high")],
    )
    if kind == "cispo":
        if given.has("worker.actor.clip_ratio_dual"):
            yield lacks("worker.actor.clip_ratio_dual", "of no use in the loss cispo")
    else:
        yield Flag("actor.dual_clip", given.number("worker.actor.clip_ratio_dual"))
    for tau in TEMPERATURES:
        yield from idle(given, "belongs to the loss sapo", tau)


def _gate(given: Given) -> Results:
    """The temperatures of SAPO, which clips nothing."""
    for tau, flag in TEMPERATURES.items():
        yield Flag(flag, given.number(tau))
    for side in ("low", "high", "dual"):
        yield from idle(given, "the loss sapo clips nothing", f"worker.actor.clip_ratio_{side}")


def _schedule(given: Given) -> Results:
    kind = given.text("worker.actor.optim.lr_scheduler_type") or ""
    if kind not in SCHEDULES:
        raise UserError(f"worker.actor.optim.lr_scheduler_type {kind!r} must be one of {', '.join(SCHEDULES)}")
    yield Flag("actor.lr_scheduler", SCHEDULES[kind])
    ratio = given["worker.actor.optim.min_lr_ratio"]
    if kind == "cosine":
        yield Flag("actor.min_lr_ratio", 0.0 if ratio is None else given.number("worker.actor.optim.min_lr_ratio"))
    elif ratio is not None:
        yield lacks("worker.actor.optim.min_lr_ratio", "a constant learning rate has no end")
    steps = given["worker.actor.optim.lr_warmup_steps"]
    if steps is not None and given.whole("worker.actor.optim.lr_warmup_steps") >= 0:
        yield lacks(
            "worker.actor.optim.lr_warmup_steps", f"give {steps} as a share of all updates: --actor.lr_warmup_ratio"
        )


def _weights(given: Given) -> Results:
    yield Flag("ds.zero_stage", 3 if given.switch("worker.actor.fsdp.enable_full_shard") else 2)
    if given["worker.actor.fsdp.torch_dtype"] is not None:
        yield differs(
            "worker.actor.fsdp.torch_dtype",
            "--ds.param_dtype is the precision of passes; DeepSpeed also keeps master weights in fp32",
        )
    offloads = [f"worker.actor.offload.offload_{what}" for what in ("params", "optimizer")]
    asked = [name for name in offloads if given.switch(name)]
    if asked:
        yield Flag("ds.enable_sleep", True)
        yield derived(", ".join(asked), "--ds.enable_sleep frees the trainer's memory while engines generate")
    reference = ("worker.ref.fsdp.enable_cpu_offload", "worker.ref.offload.offload_params")
    yield Flag("ref.offload", any(given.switch(name) for name in reference))
    tokenizer = given["worker.actor.model.tokenizer_path"]
    if tokenizer is not None and tokenizer != given["worker.actor.model.model_path"]:
        yield lacks("worker.actor.model.tokenizer_path", "the tokenizer is the checkpoint's own; put its files there")


def _lora(given: Given) -> Results:
    if given.whole("worker.actor.model.lora.rank") == 0:
        for name in ("alpha", "target_modules"):
            yield from idle(given, "of no use at rank 0", f"worker.actor.model.lora.{name}")
        return
    yield Flag("ds.lora.alpha", given.whole("worker.actor.model.lora.alpha"))
    modules = given["worker.actor.model.lora.target_modules"]
    names = modules if isinstance(modules, list) else str(modules).split(",")
    yield Flag("ds.lora.target_modules", [str(name).strip() for name in names])


ALGORITHM_RULES: tuple[Rule, ...] = (batches, _estimator, _kl, _filter, _loss, _schedule, _weights, _lora)

"""The recorded rollouts of `golden.py`, and their replay: the workers of a run train on them in this process.

A rollout holds ids, masks, the engine's log-probs and rewards; its media are made again from their sizes and seeds. The
engine gives the recorded groups to the run's own generator, so that filters, estimator, passes and update are the run's.
Import it after `cpu.prepare_process`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch
from measuring import noise_picture
from train_batches import ordinary_tokens

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.images import load_image, load_video
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.sample import EpisodeResult, Said, Sample, Segment
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation import media_store
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import default_to_one_process, leave_group, make_strategy
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, TinyModelSpec, get_kit
from lmm_r1.rl.advantages import KLWeight
from lmm_r1.rl.loop import optimizer_steps
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import Models, ask
from lmm_r1.rl.rollouts import samples_generator
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.step import Learner, make_rollout, train_on
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor, KitReferenceActor
from remote_rm.verifier import Score

CORPUS = ("user\nWhat is 12 + 34? Which digit is it?", "assistant\n<think>12 + 34 = 46</think><answer>46</answer>")
STEPS, GROUPS, SAMPLES = 2, 2, 4
REWARDS = (0.9, 1 / 3, 0.0, 1.0, 0.25, 0.9, 0.6, -0.5, 1 / 3)
LENGTHS = (3, 11, 1, 7, 14, 5, 2)
# A step is about as large as the gradient: a wrong scale shows, and noise in gradients that should be 0 stays noise.
OPTIMIZER: dict[str, Any] = {"adam.lr": 0.3, "adam.eps": 1.0, "adam.weight_decay": 0.01, "max_norm": 0.0}
OPTIMIZER |= {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
COMMON: dict[str, Any] = {
    **{f"actor.{name}": value for name, value in OPTIMIZER.items()},
    "actor.gradient_checkpointing_enable": False,
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0.0,
    "algo.mismatch_limit": float("inf"),
    "ckpt.load_enable": False,
    "data.prompt_dataset": "rows.jsonl",
    "ds.attn_implementation": "sdpa",
    "ds.param_dtype": "fp32",
    "ds.zero_stage": 2,
    "reward.remote_url": "math",
    "rollout.batch_size": GROUPS,
    "rollout.max_new_tokens": 64,
    "rollout.n_samples_per_prompt": SAMPLES,
    "train.batch_size": SAMPLES,
    "train.micro_batch_size": 8,
    "vllm.enable_sleep": False,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of two steps, each of them one or two updates on a rollout of two groups."""

    kit: str = "llm"
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Those of `lmm-r1 train_ppo_ray` in addition to `COMMON`."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the language model, by their names in its config."""
    tied: bool = False
    media: Sequence[Sequence[tuple[Any, ...]]] = ((),)
    """By prompt in turns: its media as ("image", WIDTH, HEIGHT) or ("video", FRAMES, WIDTH, HEIGHT)."""
    prompts: int = STEPS * GROUPS
    equal: Sequence[int] = ()
    """Prompts whose samples have equal rewards."""
    episodes: bool = False


IMAGES: Any = ((("image", 84, 56),), (), (("image", 56, 56), ("image", 112, 84)))
WHOLE = {"train.batch_size": GROUPS * SAMPLES}
CASES: dict[str, Case] = {
    "ppo": Case(
        sizes={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
        flags={"actor.dual_clip": 1.5, "actor.lr_scheduler": "linear", "actor.max_norm": 0.5, "actor.adam.lr": 1.0},
    ),
    "gspo": Case(
        flags={"actor.policy_loss_type": "gspo", "actor.eps_clip_low_high": (0.02, 0.03), "actor.adam.lr": 0.1}
        | {"algo.advantage.estimator": "rloo"}
    ),
    "cispo": Case(
        flags={"actor.policy_loss_type": "cispo", "actor.eps_clip_low_high": (0.1, 0.2)}
        | {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "algo.advantage.estimator": "dr_grpo"}
    ),
    "sapo": Case(
        flags={"actor.policy_loss_type": "sapo", "actor.loss_agg_mode": "seq-mean-token-mean"}
        | {"algo.advantage.estimator": "reinforce_baseline"}
    ),
    "gae": Case(
        kit="qwen2_5_vl",
        sizes={"vocab_size": 640},
        media=IMAGES,
        flags={"algo.advantage.estimator": "gae", "algo.advantage.lambd": 0.95, "algo.advantage.gamma": 0.99}
        | {f"critic.{name}": value for name, value in OPTIMIZER.items()}
        | {"algo.kl.init_coef": 0.05, "critic.value_clip": 0.05, "critic.adam.lr": 0.2},
    ),
    "kl_loss": Case(flags=WHOLE | {"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"}),
    "entropy": Case(
        flags={"actor.entropy_coef": 0.05, "algo.advantage.estimator": "reinforce"}
        | {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_threshold": (0.95, 1.05)}
    ),
    "multi_turn": Case(
        kit="qwen2_5_vl", media=IMAGES, episodes=True, flags=WHOLE | {"train.agent": "crop", "data.max_len": 4096}
    ),
    "filtered": Case(
        prompts=7,
        equal=(1, 4),
        flags={"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_min_std": 0.1}
        | {"train.num_episodes": 2, "algo.dynamic_filtering_range": (0.05, 0.95)},
    ),
    "passes": Case(
        kit="qwen2_5_vl",
        media=IMAGES,
        flags=WHOLE | {"train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 96, "train.max_epochs": 2},
    ),
    "lora": Case(
        flags={"ds.lora.rank": 4, "algo.kl.init_coef": 0.05, "algo.kl.use_loss": True, "algo.kl.estimator": "k2"}
        | {"actor.adam.lr": 1.0}
    ),
    "tied": Case(
        tied=True,
        flags=WHOLE
        | {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "clip"}
        | {"reward.overlong_buffer_len": 56, "reward.stop_properly_penalty_coef": 0.5},
    ),
    "gemma3": Case(kit="gemma3", media=IMAGES),
    "phi4": Case(
        kit="phi4_multimodal",
        media=IMAGES,
        flags={"actor.policy_loss_type": "gspo_token", "actor.eps_clip_low_high": (0.02, 0.03)},
    ),
    "video": Case(
        kit="qwen3_vl",
        flags={"algo.advantage.estimator": "flash_reinforce"},
        media=((("video", 4, 56, 84),), (("image", 84, 56), ("video", 2, 56, 56))),
    ),
}


def parts_of(described: Sequence[Any]) -> tuple[Part, ...]:
    """Return the parts of a message: texts, and media as lists of their kind, their sizes and a seed."""
    return tuple(TextPart(one) if isinstance(one, str) else medium(*one) for one in described)


def medium(kind: str, *numbers: int) -> ImagePart | VideoPart:
    """Return an image or a video by its sizes and a seed."""
    *frames, width, height, seed = numbers
    noise = random.Random(seed)
    # Squares of noise, stretched: no two patches and no two frames are equal.
    stills = [noise_picture(8, noise=noise).resize((width, height)) for _ in range(frames[0] if frames else 1)]
    return VideoPart(tuple(stills)) if kind == "video" else ImagePart(stills[0])


def encode(checkpoint: Checkpoint, described: Sequence[Any]) -> EncodedPrompt:
    """Return a user's turn as it is encoded as a prompt."""
    messages = [Message(role="user", parts=parts_of(described))]
    return checkpoint.kit.encode(
        checkpoint.processor,
        messages,
        images=[load_image(part, location="golden") for part in images_of(messages)],
        videos=[load_video(part, location="golden") for part in videos_of(messages)],
        add_generation_prompt=True,
    )


def build(case: Case, folder: Path) -> Checkpoint:
    """Write the random checkpoint of a case."""
    kit = get_kit(case.kit)
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=3, tie_embeddings=case.tied)
    kit.build_tiny(spec, CORPUS, folder)
    checkpoint = Checkpoint(str(folder))
    if case.sizes:
        config = checkpoint.config
        config.get_text_config().update(case.sizes)
        torch.manual_seed(spec.seed)
        model = kit.model_class_of(config)(config)
        kit.tune_tiny(model, spec)
        model.save_pretrained(folder)
        checkpoint = Checkpoint(str(folder))
    return checkpoint


def make_rollouts(case: Case, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return new groups of a case, one per prompt, without the engine's log-probs."""
    noise, records = random.Random(5), []
    ordinary = ordinary_tokens(checkpoint.kit, checkpoint.processor, checkpoint.config).tolist()

    def generated(length: int) -> dict[str, Any]:
        return {"generated": noise.choices(ordinary, k=length)}

    for place in range(case.prompts):
        media = [[*one, 10 * place + number] for number, one in enumerate(case.media[place % len(case.media)])]
        prompt = [*media, f"What is {place} + {noise.randrange(100)}?"]
        # Two episodes of a group share their first turn, which is long enough for a node of a tree.
        first, samples = generated(20), []
        for number in range(SAMPLES):
            index = SAMPLES * place + number
            segments = [generated(LENGTHS[index % len(LENGTHS)])]
            if case.episodes and number != 3:
                shown = ["Look.", *([["image", 56, 84, index]] if number == 2 else [])]
                observed = encode(checkpoint, shown).token_ids
                begin = first if number < 2 else generated(4)
                segments = [begin, {"observation": observed, "parts": shown}, *segments]
            reward = 0.5 if place in case.equal else REWARDS[index % len(REWARDS)]
            episode = {"masked": index in (1, 14)} if case.episodes else {}
            samples.append({"reward": reward, **episode, "segments": segments})
        records.append({"prompt": prompt, "ids": encode(checkpoint, prompt).token_ids, "samples": samples})
    return records


class RecordedEngine:
    """Gives the recorded groups, by the rows' locations."""

    def __init__(self, checkpoint: Checkpoint, records: Sequence[Mapping[str, Any]]) -> None:
        self.rows = [
            Row(
                messages=(Message(role="user", parts=parts_of(record["prompt"])),),
                answer="46",
                datasource="golden",
                location=f"row {place}",
            )
            for place, record in enumerate(records)
        ]
        self.groups = {
            row.location: _group(row, record, checkpoint) for row, record in zip(self.rows, records, strict=True)
        }

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_group(self, row: Row, settings: GroupSettings) -> SampledGroup:
        return SampledGroup(samples=self.groups[row.location])

    def load_weights_from(self, folder: str) -> None:
        """Keep none: the responses are there already."""


def _group(row: Row, record: Mapping[str, Any], checkpoint: Checkpoint) -> list[Sample]:
    def segment(kind: Any, ids: Sequence[int], described: Sequence[Any]) -> Segment:
        encoded = encode(checkpoint, described)
        assert encoded.token_ids == list(ids), f"{row.location}: the {kind} is encoded as other ids than the recorded"
        media = None if encoded.media is None else media_store.put(encoded.media)
        return Segment(kind=kind, token_ids=tuple(ids), media=media)

    prompt = segment("prompt", record["ids"], record["prompt"])
    samples = []
    for number, sample in enumerate(record["samples"]):
        segments = [prompt]
        for one in sample["segments"]:
            if "observation" in one:
                segments.append(segment("observation", one["observation"], one["parts"]))
            else:
                known = tuple(one["log_probs"]) if "log_probs" in one else None
                segments.append(Segment(kind="generated", token_ids=tuple(one["generated"]), log_probs=known))
        reward, masked = sample["reward"], sample.get("masked")
        said = (Said("assistant", ""),) * sum("generated" in one for one in sample["segments"])
        played = EpisodeResult(end="turns" if masked else "over", images=0, rewards={}, counts={}, said=said)
        samples.append(
            Sample(
                row=row,
                segments=tuple(segments),
                response="",
                finish_reason="length" if number == 3 else "stop",
                weight_version=0,
                reward=Score(reward=reward, score=reward, parts={"accuracy": float(reward >= 0.9)}),
                played=None if masked is None else played,
                masked=bool(masked),
            )
        )
    return samples


class Ref:
    """A reference to an object, used instead of Ray's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def hex(self) -> str:
        return f"{id(self):x}"


class Handle:
    """An object of this process, called as a Ray actor is."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any, **named: Any) -> Ref:
            return Ref(getattr(self.actor, name)(*map(_value, given), **named))

        return SimpleNamespace(remote=remote)


def _value(given: Any, timeout: float | None = None) -> Any:
    if isinstance(given, list):
        return [_value(one) for one in given]
    return given.value if isinstance(given, Ref) else given


@contextmanager
def without_ray() -> Iterator[None]:
    """Let references be of this process, which is its own process group."""
    default_to_one_process()

    def wait(refs: list[Ref], *, num_returns: int = 1, **settings: Any) -> tuple[list[Ref], list[Ref]]:
        return refs[:num_returns], refs[num_returns:]

    try:
        with mock.patch.multiple(ray, get=_value, put=Ref, wait=wait):
            yield
    finally:
        leave_group()


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a run's models, in this process instead of in Ray."""

    policy: Any
    critic: Any = None
    reference: Any = None

    @property
    def models(self) -> Models:
        """The groups of one worker each."""
        groups: dict[str, Any] = {name: None if one is None else _group_of(one) for name, one in vars(self).items()}
        return Models(**groups)

    @property
    def engines(self) -> dict[str, Any]:
        """The trained models under DeepSpeed, by their names in the record."""
        return {"policy": self.policy.engine} | ({} if self.critic is None else {"critic": self.critic.engine})


def _group_of(worker: Any) -> WorkerGroup:
    group = object.__new__(WorkerGroup)
    group._actor_handlers, group.duplicate_actors = [Handle(worker)], 1
    return group


def start_workers(config: PPOConfig, *, rows: int) -> Workers:
    """Load the models of a run, as its workers do."""
    path, steps = config.actor.model_name_or_path, optimizer_steps(config, num_rows=rows)
    started: dict[str, Any] = {}
    kinds = {"policy": KitPolicyActor, "reference": KitReferenceActor, "critic": KitCriticActor}
    given: dict[str, tuple[Any, ...]] = {"policy": (steps, []), "reference": (), "critic": (steps,)}
    has = {"policy": True, "reference": config.needs_reference_model, "critic": bool(config.critic.model_name_or_path)}
    for name, kind in kinds.items():
        if has[name]:
            started[name] = object.__new__(kind)
            started[name].init_model_from_pretrained(make_strategy(config), path, *given[name])
    return Workers(**started)


def replay(name: str, records: list[dict[str, Any]], folder: Path, *, flags: Mapping[str, Any]) -> Iterator[Any]:
    """Make the steps of a case; yield what is there at first and after each step: metrics, groups and weights.

    Groups that `records` lacks are made and added to it.

    Args:
        flags: further flags of the run.
    """
    case = CASES[name]
    checkpoint = build(case, folder / "model")
    own = {"actor.model_name_or_path": checkpoint.path, "ckpt.output_dir": str(folder / "run")}
    config = resolve(dotted.replace(PPOConfig(), COMMON | own | dict(case.flags) | dict(flags)))
    torch.manual_seed(0)
    with without_ray():
        workers = start_workers(config, rows=case.prompts)
        if not records:
            records += make_rollouts(case, checkpoint)
            note_log_probs(records, checkpoint, workers.policy, max_len=config.data.max_len)
        engine = RecordedEngine(checkpoint, records)
        engines, kl = [Handle(engine)], config.algo.kl
        learner = Learner(
            config=config,
            models=workers.models,
            engines=engines,
            prompts=PromptStream(engine.rows, seed=config.train.seed, episodes=config.train.num_episodes),
            generator=samples_generator(config, engines, leave_out=lambda reason: None),
            kl_weight=KLWeight(value=kl.init_coef, target=kl.target, horizon=kl.horizon),
            mismatch=Mismatch(config),
        )
        learner.share_prefix = all(ask(learner.models.policy, KitPolicyActor.shares_prefix))
        yield {}, [], _weights(workers)
        for step in range(1, STEPS + 1):
            made = make_rollout(learner, step)
            assert made is not None, f"{name}: there are too few groups for step {step}"
            metrics = train_on(learner, made.rollout, step=step)
            yield metrics, [group[0].row.location for group in made.rollout.groups], _weights(workers)
        for engine_of_model in workers.engines.values():
            engine_of_model.destroy()


def _weights(workers: Workers) -> dict[str, dict[str, torch.Tensor]]:
    return {
        model: {name: value.detach().clone() for name, value in (whole_state_dict(engine) or {}).items()}
        for model, engine in workers.engines.items()
    }


def note_log_probs(records: list[dict[str, Any]], checkpoint: Checkpoint, policy: Any, *, max_len: int) -> None:
    """Add the engine's log-probs to new groups: those of the policy, some of them off by a few hundredths."""
    noise = random.Random(7)
    for group, record in zip(RecordedEngine(checkpoint, records).groups.values(), records, strict=True):
        for sample, described in zip(group, record["samples"], strict=True):
            found = policy.forward([[TrainingSample.of(sample, max_len=max_len)]])[0][0].tolist()
            spans = iter(sample.action_ranges)
            for segment in described["segments"]:
                if "generated" in segment:
                    first, end = next(spans)
                    # The log-prob of a token is at the place before it.
                    off = [value + noise.gauss(0, 0.05) for value in found[first - 1 : end - 1]]
                    segment["log_probs"] = [round(value, 6) for value in off]


def read_rollouts(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the recorded groups of each case."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        found.setdefault(record.pop("case"), []).append(record)
    return found

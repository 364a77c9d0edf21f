"""Whole runs on packed sequences and on padded ones: the same samples give the same losses and the same model.

The first run samples from vLLM, whose samples would differ between runs by chance; the others train on its samples.
Everything else of a run is real in all of them: Ray, the engine, which gets every update's weights, DeepSpeed, models.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.commands import flags, write_rows
from helpers.commands_here import start_anew
from safetensors.torch import load_file

from lmm_r1.cli import make_task, train_ppo_ray, train_sft
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import MediaRef, Sample, Segment
from lmm_r1.generation.group import GroupSettings
from lmm_r1.rl import outputs
from lmm_r1.rl.ahead import ReferenceAhead
from lmm_r1.rl.rollouts import KitSamplesGenerator
from lmm_r1.rl.samples import TrainingSample

pytestmark = pytest.mark.slow

# Any number in [0, 1) that follows from the response alone.
REWARD = """
import zlib
def reward_func(queries, prompts, labels):
    return {"rewards": [zlib.crc32(query.encode()) / 2**32 for query in queries]}
"""
PROMPTS = 4
SAMPLES = 3
STEPS = 12
# Three optimizer steps a rollout: a group of three and a third of another in each.
BATCH = 4
NEW_TOKENS = 12
CURVES = ("policy_loss", "kl", "entropy_loss", "actor_grad_norm", "logprobs_diff", "ppo_kl", "reward", "actor_lr")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run has left."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    ahead: list[int]
    """Samples of each time that the reference was given some apart from a whole rollout."""

    @classmethod
    def of(cls, folder: Path, *, ahead: Sequence[int] = ()) -> "Run":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        return cls(metrics=list(map(json.loads, lines)), weights=weights, ahead=list(ahead))

    def curve(self, name: str) -> torch.Tensor:
        return torch.tensor([line[name] for line in self.metrics], dtype=torch.float64)


@contextmanager
def environment_kept() -> Iterator[None]:
    """What a command sets for the processes it starts does not reach other tests."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def train(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A function that makes a run on mixed rows; all runs but the first get the samples of the first."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "reward.py").write_text(REWARD)
    rows = folder / "rows"
    make_task.main(["digits", "--modality", "mixed", "--rows", str(PROMPTS * STEPS), "--output", str(rows)])
    settings: dict[str, object] = {
        "actor.model_name_or_path": tiny_checkpoint("qwen2_5_vl"),
        "actor.num_gpus_per_node": 1,
        "actor.entropy_coef": 0.001,
        "actor.adam.lr": 1e-3,
        # Of the size of the gradients. By default Adam takes a whole step along a gradient that is nothing but rounding, as
        # where a batch's rewards are all alike: two runs would then be 1e-3 apart instead of 1e-6.
        "actor.adam.eps": 1e-3,
        # So that a shorter run is the beginning of a longer one.
        "actor.lr_scheduler": "constant",
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": rows,
        "data.max_len": 256,
        "reward.remote_url": folder / "reward.py",
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.micro_batch_size": 4,
        "train.batch_size": BATCH,
        "train.micro_batch_size": 2,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k3",
        "ds.param_dtype": "fp32",
    }
    recorded: list[bytes] = []

    def run(name: str, *switches: str, steps: int = STEPS, **changes: object) -> Run:
        records, replayed = not recorded, iter(recorded)
        sampled, start, ahead = KitSamplesGenerator.generate, ReferenceAhead._start, []

        def counted(self: ReferenceAhead, samples: Sequence[TrainingSample]) -> None:
            ahead.append(len(samples))
            start(self, samples)

        def generate(
            self: KitSamplesGenerator,
            rows: Sequence[Row],
            settings: GroupSettings,
            *,
            finished: Any = None,
            **place: int,
        ) -> Any:
            if records:
                recorded.append(without_ray(of_many_lengths(sampled(self, rows, settings, **place))))
            groups = in_store(recorded[-1] if records else next(replayed))
            for group in reversed(groups if finished else []):
                finished(group)
            return groups

        values = settings | {"data.max_samples": PROMPTS * steps, "ckpt.output_dir": folder / name}
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        with pytest.MonkeyPatch.context() as patch, environment_kept():
            patch.setattr(KitSamplesGenerator, "generate", generate)
            # Less than a group has.
            patch.setattr(outputs, "AHEAD_TOKENS", 40)
            patch.setattr(ReferenceAhead, "_start", counted)
            train_ppo_ray.main([*flags(values), "--algo.kl.use_loss", *switches])
        return Run.of(folder / name, ahead=ahead)

    return run


def of_many_lengths(groups: list[list[Sample]]) -> list[list[Sample]]:
    """The groups with responses cut to one of twelve lengths each, as a model ends them that has learnt to."""
    assert all(sample.media == group[0].media for group in groups for sample in group)
    return [[_cut(sample) for sample in group] for group in groups]


def _cut(sample: Sample) -> Sample:
    prompt, response = sample.segments
    length = 1 + zlib.crc32(sample.response.encode()) % NEW_TOKENS
    kept = {"token_ids": response.token_ids[:length], "log_probs": response.log_probs[:length], "weights": ()}
    return replace(sample, segments=(prompt, replace(response, **kept)))


def without_ray(groups: list[list[Sample]]) -> bytes:
    """Groups, and what Ray's object store holds for them, which ends with Ray."""
    refs = {item.key: item.ref for group in groups for sample in group for item in sample.media}
    objects = dict(zip(refs, ray.get([ref.stored for ref in refs.values()]), strict=True))
    return pickle.dumps((_with_refs(groups, {key: replace(ref, stored=None) for key, ref in refs.items()}), objects))


def in_store(recorded: bytes) -> list[list[Sample]]:
    """The groups, with their media in the object store of the Ray that runs."""
    groups, objects = pickle.loads(recorded)
    refs = {key: MediaRef(key=key, stored=ray.put(packed), nbytes=packed.nbytes) for key, packed in objects.items()}
    return _with_refs(groups, refs)


def _with_refs(groups: list[list[Sample]], refs: dict[str, MediaRef]) -> list[list[Sample]]:
    def changed(segment: Segment) -> Segment:
        return segment if segment.media is None else replace(segment, media=refs[segment.media.key])

    return [[replace(sample, segments=tuple(map(changed, sample.segments))) for sample in group] for group in groups]


def largest_difference(ours: Run, theirs: Run, name: str) -> float:
    """The largest difference between two curves, as a share of the second one's mean size."""
    length = min(len(ours.metrics), len(theirs.metrics))
    one, other = ours.curve(name)[:length], theirs.curve(name)[:length]
    return float((one - other).abs().max() / other.abs().mean())


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The Euclidean distance of two models; weight by weight, Adam makes as much of rounding error as of a gradient."""
    return float(sum((ours[key] - theirs[key]).pow(2).sum() for key in ours) ** 0.5)


@pytest.fixture(scope="module")
def untrained(tiny_checkpoint: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    return load_file(tiny_checkpoint("qwen2_5_vl") / "model.safetensors")


@pytest.fixture(scope="module")
def shared(train: Callable[..., Run]) -> Run:
    """The run with the flags as they are by default, which samples."""
    return train("shared", "--train.colocate_all")


TOGETHER = "--train.colocate_all"
DURING = "--ref.during_generation"
NOT_SHARED = "--train.no_shared_prefix_enable"
OTHERS = {
    "padded": ((TOGETHER, NOT_SHARED), {"steps": STEPS}),
    "packed": ((TOGETHER, NOT_SHARED, "--ds.packing_samples"), {"steps": 4}),
    # So few tokens that groups are divided.
    "by tokens": ((TOGETHER, "--train.dynamic_batch_enable"), {"steps": 4, "train__max_tokens_per_gpu": 150}),
    "reference during generation": ((TOGETHER, DURING), {"steps": 4}),
    "two references during generation": ((DURING,), {"steps": 4, "ref__num_gpus_per_node": 2}),
    "two workers with a share of each sequence, ZeRO-3": (
        (),
        {
            "steps": 4,
            "actor__num_gpus_per_node": 2,
            "ref__num_gpus_per_node": 2,
            "ds__ulysses_size": 2,
            "ds__zero_stage": 3,
        },
    ),
}


def test_the_first_run_has_text_and_images_and_responses_of_many_lengths(shared):
    assert [line["step"] for line in shared.metrics] == list(range(1, STEPS + 1))
    assert shared.curve("response_length").min() < 0.75 * shared.curve("response_length").max()
    assert 0 < shared.curve("mismatch/max").max() < 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_on_the_same_samples_has_the_same_curves(shared, train, untrained, name):
    switches, changes = OTHERS[name]
    other = train(name.replace(" ", "_"), *switches, **changes)
    assert len(other.metrics) == changes["steps"]
    assert sum(other.ahead) == (changes["steps"] * PROMPTS * SAMPLES if DURING in switches else 0)
    assert len(other.ahead) >= (2 * changes["steps"] if DURING in switches else 0), "none began before the end"
    differences = {curve: largest_difference(other, shared, curve) for curve in CURVES}
    # The mean of log-probs' changes, which nearly cancel out.
    assert differences.pop("ppo_kl") < 1e-3
    assert max(differences.values()) < 1e-4, differences
    # The first run's engine sampled; the policy is the same one on all ranks.
    assert other.curve("mismatch/mean").max() < 1e-3
    if len(other.metrics) == STEPS:
        apart, moved = (distance(shared.weights, weights) for weights in (other.weights, untrained))
        assert apart < 1e-3 * moved


def test_with_lora_the_policy_without_its_adapters_is_the_reference_as_a_second_copy_was(shared, train):
    # In the second step the adapters have learned, and the samples are of another policy.
    changes = {"steps": 2, "ds__lora__rank": 4, "actor__adam__lr": 1e-2, "algo__mismatch_limit": 100.0}
    base = train("base", TOGETHER, **changes)
    # A reference that would be refreshed after the end is a second copy of the initial weights.
    second = train("second_copy", TOGETHER, **changes, ref__refresh_steps=3)
    assert base.curve("kl")[1] > 5 * base.curve("kl")[0] > 0
    differences = {curve: largest_difference(base, second, curve) for curve in CURVES}
    assert max(differences.values()) < 1e-6, differences


def test_supervised_training_has_the_same_losses_on_packed_rows(tiny_checkpoint, tmp_path, own_environment):
    folder = tmp_path / "task"
    make_task.main(["digits", "--modality", "mixed", "--rows", "20", "--solutions", "--output", str(folder)])
    rows = list(map(json.loads, (folder / "rows.jsonl").read_text().splitlines()))
    # Rows that are too long: one in a pass beside one that fits, and two that are all of a pass.
    for place in (1, 6, 7):
        rows[place]["messages"][0]["content"] = "too long " * 200
    write_rows(folder, *rows)

    def losses(name: str, *switches: str) -> torch.Tensor:
        values = {
            "model.model_name_or_path": tiny_checkpoint("qwen2_5_vl"),
            "data.dataset": folder,
            "data.max_len": 256,
            "ds.param_dtype": "fp32",
            "adam.lr": 1e-3,
            "train.batch_size": 4,
            "train.micro_batch_size": 2,
            "train.max_epochs": 1,
            "ckpt.output_dir": tmp_path / name,
        }
        with pytest.MonkeyPatch.context() as patch:
            start_anew(patch)
            train_sft.main([*flags(values), "--data.keep_order", *switches])
        return Run.of(tmp_path / name).curve("loss")

    padded, packed = losses("padded"), losses("packed", "--ds.packing_samples")
    assert len(padded) == 5
    assert padded.min() < 0.9 * padded.max()
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=0)

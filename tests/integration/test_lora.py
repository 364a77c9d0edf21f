"""LoRA under DeepSpeed: what a run saves, resumes from and sends to the engines is the adapted model."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.passes import logits_of, next_log_probs
from helpers.rl_steps import sample
from helpers.tiny_models import MIXTURES, build_experts, flat_actor, make_actor
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lmm_r1 import dotted
from lmm_r1.checkpoints.merging import checkpoint_folder, load_trained, load_with_adapter, merge_adapter, read_weights
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.generation import weight_sync
from lmm_r1.generation.weight_bucket import weights_in
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import ADAPTER_FOLDER, merged_state_dict
from lmm_r1.rl import workers
from lmm_r1.train.publication import MovingAverage

KIT = "qwen2_5_vl"
SEQUENCES = torch.arange(3, 19)[None]  # (1, 16)
EVERYTHING = torch.ones_like(SEQUENCES)
RSLORA = {"ds.lora.use_rslora": True}
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "LoRA, ZeRO-2": (2, {}),
    "LoRA, ZeRO-3": (3, {}),
    "rsLoRA, ZeRO-3": (3, RSLORA),
    "4 bits, moments in 8 bits, ZeRO-2": (2, {"ds.load_in_4bit": True, "optim": "adamw_8bit"}),
    "rsLoRA in 4 bits, ZeRO-1": (1, {"ds.load_in_4bit": True, **RSLORA}),
    "moments in 8 bits, ZeRO-3": (3, {"optim": "adamw_8bit"}),
}


def make_run(stage: int, **flags: object) -> KitStrategy:
    settings = {
        "train.batch_size": 1,
        "train.micro_batch_size": 1,
        "ds.zero_stage": stage,
        "ds.param_dtype": "fp32",
        "ds.lora.rank": 4,
        "adam.lr": 1e-2,
    }
    strategy = make_strategy(dotted.replace(SFTConfig(), settings | flags))
    strategy.setup_distributed()
    return strategy


def prepared(strategy: KitStrategy, folder: Path, **packed: bool) -> KitActor:
    args = strategy.args
    actor = flat_actor(
        str(folder),
        attn_implementation="sdpa",
        param_dtype=args.ds.param_dtype,
        ds_config=strategy.get_ds_train_config(),
        lora_rank=args.ds.lora.rank,
        use_rslora=args.ds.lora.use_rslora,
        load_in_4bit=args.ds.load_in_4bit,
        **packed,
    )
    settings = {
        "optim": args.optim,
        "muon": vars(args.muon),
        "adam": vars(args.adam),
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
        "min_lr_ratio": 0.1,
        "max_norm": 1.0,
        "scheduler_steps": 10,
    }
    return strategy.prepare((actor, settings))[0]


def train(strategy: KitStrategy, actor: KitActor, *, steps: int) -> list[float]:
    losses = []
    actor.train()
    for _ in range(steps):
        loss = -next_log_probs(actor, SEQUENCES, attention_mask=EVERYTHING).mean()
        strategy.backward(loss, actor, None)
        strategy.optimizer_step(None, actor, None)
        losses.append(loss.item())
    actor.eval()
    return losses


def logits(actor: KitActor) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(actor, SEQUENCES, attention_mask=EVERYTHING)


class RecordingEngine:
    """Takes the calls that a rollout actor takes, and keeps the weights that come as files."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*args: object, **kwargs: object) -> None:
            self.calls.append((name, args, kwargs))
            if name == "load_weights_from":
                self.weights = load_file(Path(args[0]) / "model.safetensors")

        return SimpleNamespace(remote=remote)


def worker_of(model: KitActor, strategy: object, *, kind: type = workers.KitPolicyActor) -> Any:
    """A worker of which only the model is set up."""
    worker = object.__new__(kind)
    worker.model, worker.strategy = model, strategy
    return worker


def sending(actor: KitActor, engine: RecordingEngine) -> workers.KitPolicyActor:
    """A worker with an engine to which it sends weights."""
    worker = worker_of(actor, SimpleNamespace(config=PPOConfig()))
    worker.vllm_engines = [engine]
    return worker


def sent_by_broadcast(
    worker: workers.KitPolicyActor, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], int]:
    """Return what is broadcast by name, and in how many buckets, with a GPU pretended."""
    received: dict[str, torch.Tensor] = {}
    sent = []

    def broadcast(buffer: torch.Tensor) -> None:
        name, (slots,), _ = engine.calls[-1]
        assert name == "receive_bucket", "the engines wait for it already"
        weights = dict(weights_in(buffer.clone(), slots))
        assert received.keys().isdisjoint(weights)
        received.update(weights)
        sent.append(len(buffer))

    worker.channel = weight_sync.BroadcastChannel([engine], broadcast)
    monkeypatch.setattr(workers.ray, "get", lambda references: None)
    monkeypatch.setattr(workers.cpu, "has_cuda", lambda: True)
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 4096)
    worker.broadcast_to_vllm()
    assert engine.calls[-1][0] == "reset_caches"
    return received, len(sent)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_sent_as_the_checkpoint_has_them(stage, tiny_checkpoint, tmp_path, monkeypatch):
    """Transformers holds the experts of a layer as one tensor, by a name that vLLM does not know."""
    folder = tmp_path / "experts"
    build_experts(tiny_checkpoint("llm"), folder, architecture="Mixtral", **MIXTURES["Mixtral"])
    strategy = make_run(stage, **{"ds.lora.rank": 0})
    actor = prepared(strategy, folder)
    train(strategy, actor, steps=1)
    saved = tmp_path / "saved"
    kit = get_kit("llm")
    strategy.save_model(actor, kit.load_processor(str(folder), trust_remote_code=False), str(saved))
    expected, before = load_file(saved / "model.safetensors"), load_file(folder / "model.safetensors")
    assert any(not torch.equal(expected[name], before[name]) for name in expected)
    engine = RecordingEngine()
    received, buckets = sent_by_broadcast(sending(actor, engine), engine, monkeypatch)
    assert received.keys() == expected.keys() == before.keys()
    assert 1 < buckets < len(received)
    assert all(torch.equal(weight, expected[name]) for name, weight in received.items())


def merged_by_the_command(
    base: Path, adapter: Path, checkpoints: Path, strategy: KitStrategy
) -> Iterator[dict[str, torch.Tensor]]:
    """What `lmm-r1 merge` makes of the adapter, and of DeepSpeed's shards."""
    yield _merged(load_with_adapter(str(base), adapter, dtype=torch.float32, trust_remote_code=False))
    yield _merged(
        load_trained(
            str(base),
            read_weights(checkpoint_folder(checkpoints, tag=None)),
            lora_alpha=strategy.config.ds.lora.used_alpha,
            use_rslora=strategy.args.ds.lora.use_rslora,
            dtype=torch.float32,
            trust_remote_code=False,
        )
    )


def _merged(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    merge_adapter(model)
    return model.state_dict()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("stage", "flags"), RUNS.values(), ids=list(RUNS))
def test_a_run_resumes_saves_a_merged_model_and_sends_it(stage, flags, tiny_checkpoint, tmp_path, monkeypatch):
    folder = tiny_checkpoint(KIT)
    original = load_file(folder / "model.safetensors")
    strategy = make_run(stage, **flags)
    actor = prepared(strategy, folder)
    train(strategy, actor, steps=2)
    strategy.save_ckpt(actor.model, str(tmp_path / "states"), "global_step2", client_state={"global_step": 2})
    expected = train(strategy, actor, steps=2)

    resumed = prepared(strategy, folder)
    _, states = strategy.load_ckpt(resumed.model, str(tmp_path / "states"))
    assert states["global_step"] == 2
    assert train(strategy, resumed, steps=2) == pytest.approx(expected, abs=1e-5)

    kit = get_kit(KIT)
    saved = tmp_path / "saved"
    strategy.save_model(actor, kit.load_processor(str(folder), trust_remote_code=False), str(saved))
    weights = load_file(saved / "model.safetensors")
    assert set(weights) == set(original)
    strategy.save_ckpt(actor.model, str(tmp_path / "last"), "global_step4")
    loaded = make_actor(saved)
    for merged in merged_by_the_command(folder, saved / ADAPTER_FOLDER, tmp_path / "last", strategy):
        for name, weight in loaded.model.state_dict().items():
            torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=0)
    assert sum(not torch.equal(weights[name], original[name]) for name in original) == 14
    assert {path.name for path in (saved / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert kit.load_processor(str(saved), trust_remote_code=False).chat_template

    before = {name: weight.clone() for name, weight in whole_state_dict(actor.model).items()}
    engine = RecordingEngine()
    worker = sending(actor, engine)
    monkeypatch.setattr(workers.ray, "get", lambda references: None)
    worker.broadcast_to_vllm()
    assert set(engine.weights) == set(weights)
    assert all(torch.equal(engine.weights[name], weight) for name, weight in weights.items())

    received, _ = sent_by_broadcast(worker, engine, monkeypatch)
    assert len(received) == 14
    assert all(torch.equal(weight, weights[name]) for name, weight in received.items()), "the checkpoint's names"
    after = whole_state_dict(actor.model)
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())

    torch.testing.assert_close(logits(loaded), logits(actor), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("run", ["LoRA, ZeRO-2", "LoRA, ZeRO-3", "rsLoRA in 4 bits, ZeRO-1"])
def test_in_bf16_the_saved_model_is_the_trained_one_bit_by_bit(run, tiny_checkpoint, tmp_path):
    stage, flags = RUNS[run]
    strategy = make_run(stage, **flags | {"ds.param_dtype": "bf16"})
    actor = prepared(strategy, tiny_checkpoint(KIT))
    first, *_, last = train(strategy, actor, steps=4)
    assert last < first
    processor = get_kit(KIT).load_processor(str(tiny_checkpoint(KIT)), trust_remote_code=False)
    strategy.save_model(actor, processor, str(tmp_path / "saved"))
    assert torch.equal(logits(make_actor(tmp_path / "saved", param_dtype="bf16")), logits(actor))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("run", ["LoRA, ZeRO-2", "rsLoRA, ZeRO-3"])
def test_a_moving_average_is_that_of_the_merged_weights(run, tiny_checkpoint, tmp_path):
    stage, flags = RUNS[run]
    strategy = make_run(stage, **flags)
    actor = prepared(strategy, tiny_checkpoint(KIT))

    def merged() -> dict[str, torch.Tensor]:
        return merged_state_dict(actor.model.module, whole_state_dict(actor.model))

    average, expected = MovingAverage(actor.model, beta=0.75), merged()
    for _ in range(3):
        train(strategy, actor, steps=1)
        average.update()
        expected = {name: 0.75 * expected[name] + 0.25 * weight for name, weight in merged().items()}
    before, processor = merged(), get_kit(KIT).load_processor(str(tiny_checkpoint(KIT)), trust_remote_code=False)
    actor.model.save_checkpoint(str(tmp_path), tag="step")
    file = average.save(tmp_path / "step")
    resumed = MovingAverage(actor.model, beta=0.75)
    resumed.load(file.parent)
    with resumed.in_weights():
        strategy.save_model(actor, processor, str(tmp_path / "saved"))
    torch.testing.assert_close(make_actor(tmp_path / "saved").model.state_dict(), expected, atol=1e-6, rtol=0)
    assert not (tmp_path / "saved" / ADAPTER_FOLDER).exists(), "no adapter of this rank is the average"
    torch.testing.assert_close(merged(), before, atol=0, rtol=0)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("run", ["LoRA, ZeRO-2", "LoRA, ZeRO-3", "4 bits, moments in 8 bits, ZeRO-2"])
def test_a_policy_without_its_adapters_gives_the_log_probs_of_a_second_copy(run, tiny_checkpoint):
    stage, flags = RUNS[run]
    folder, strategy = tiny_checkpoint(KIT), make_run(stage, **flags)
    packed = {"packing_samples": True, "share_prefix": True}
    actor = prepared(strategy, folder, **packed)
    worker = worker_of(actor, strategy)
    train(strategy, actor, steps=2)
    # Two responses to one prompt.
    passes = [[sample(range(3, 11), response, group=0) for response in (range(11, 19), range(30, 38))]]
    second = flat_actor(
        str(folder), attn_implementation="sdpa", param_dtype="fp32", load_in_4bit="ds.load_in_4bit" in flags, **packed
    )
    [expected] = worker_of(second, strategy, kind=workers.KitReferenceActor).forward(passes)
    [before], [found], [after] = worker.forward(passes), worker.reference_forward(passes), worker.forward(passes)
    assert all(map(torch.equal, found, expected))
    assert (torch.stack(before) - torch.stack(expected)).abs().max() > 1e-2, "it has learned"
    assert all(map(torch.equal, after, before)), "its adapters are back"
    train(strategy, actor, steps=1)
    assert all(map(torch.equal, worker.reference_forward(passes)[0], expected))

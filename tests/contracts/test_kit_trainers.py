"""Every trainer on every kit; all weights, adapters, and adapters on 4 bits by turns: two updates, saved and taken up again."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands_here import destroy_engines, one_process
from helpers.conversations import clip, message, picture
from helpers.passes import logits_of
from helpers.sessions import begun, run_of
from helpers.tables import kits_with, table
from helpers.tiny_models import make_actor
from helpers.value_models import make_value_model

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, RMConfig, SFTConfig, resolve
from lmm_r1.data.messages import Message, PreferenceRow, Row
from lmm_r1.lmm_kits import KITS, Checkpoint, get_kit
from lmm_r1.models.actor import KitValueModel
from lmm_r1.models.adapters import adapted_layers, quantized_layers
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.supervised.loop import SupervisedRun
from lmm_r1.supervised.pairs import DPORun, RMRun
from lmm_r1.supervised.sft import KDRun, SFTRun

STEPS = 2
TRAINERS = {"sft": (SFTRun, SFTConfig), "dpo": (DPORun, DPOConfig), "rm": (RMRun, RMConfig), "kd": (KDRun, KDConfig)}
LORA = {"ds.lora.rank": 4, "ds.lora.alpha": 8, "adam.lr": 1e-3}
METHODS = {
    "full": {"adam.lr": 1e-4},
    "lora": LORA,
    "qlora": {**LORA, "ds.load_in_4bit": True, "model.gradient_checkpointing_enable": True},
}
# Of which peft takes the names of an MLP's layers for those of experts, so that these get no adapter.
ATTENTION_ALONE = {"glm4v_moe"}
FLAGS = table("contracts/kit_trainers", "flags")
VIDEOS = "qwen2_5_vl"
TRAINED = {"sft": kits_with("SFT"), "dpo": kits_with("DPO")}
BY_METHOD = {"full": KITS, "lora": kits_with("LoRA"), "qlora": kits_with("QLoRA")}


def case_is_run(trainer: str, name: str, method: str) -> bool:
    """Run each trainer on every kit in one way, so that the four trainers run each way at least once on a kit.

    `test_kit_training` freezes the vision tower of every kit.
    """
    ways = [way for way, names in BY_METHOD.items() if name in names]
    turn = list(KITS).index(name) + list(TRAINERS).index(trainer)
    return ways[turn % len(ways)] == method


CASES = [
    pytest.param(trainer, name, method, marks=() if trainer == "sft" or name == VIDEOS else pytest.mark.full)
    for name in KITS
    for trainer in TRAINERS
    for method in METHODS
    if name in TRAINED.get(trainer, KITS) and case_is_run(trainer, name, method)
]


def prompts_of(name: str) -> tuple[Message, Message]:
    """One with a picture and one without, or with a video."""
    text = message("user", "What is 12 + 34?")
    if not get_kit(name).takes_images:
        return text, message("user", "Which digit comes next?")
    video = message("user", clip(2, 56, 56), "Which digit?")
    return message("user", picture(84, 56), "Which digit is this?"), video if name == VIDEOS else text


def rows_of(trainer: str, name: str) -> list[Any]:
    """Two rows of what a trainer learns from."""
    made = []
    for number, prompt in enumerate(prompts_of(name)):
        right, wrong = (message("assistant", text) for text in ("<answer>46</answer>", "No idea."))
        common = {"messages": (prompt,), "location": f"rows.jsonl line {number + 1}"}
        if trainer in ("dpo", "rm"):
            made.append(PreferenceRow(chosen=(right,), rejected=(wrong,), margin=None, **common))
        else:
            common["messages"] = (prompt, right)
            made.append(Row(answer="46", datasource="test", **common))
    return made


@pytest.fixture(scope="module", autouse=True)
def deepspeed_here() -> Iterator[None]:
    with one_process():
        yield


@pytest.fixture(autouse=True)
def engines_freed() -> Iterator[None]:
    yield
    destroy_engines()


@pytest.fixture(scope="module")
def checkpoint_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    """A function from a kit's name to its tiny checkpoint, whose parts are loaded once."""
    return cache(lambda name: Checkpoint(str(tiny_checkpoint(name))))


@pytest.fixture
def started(checkpoint_of, larger_teacher, tmp_path) -> Callable[..., SupervisedRun]:
    """A function that returns the run of a case, as its command prepares it."""

    def run(trainer: str, name: str, method: str) -> SupervisedRun:
        run_class, config_class = TRAINERS[trainer]
        checkpoint, kit = checkpoint_of(name), get_kit(name)
        flags = {**FLAGS, **METHODS[method], "ckpt.output_dir": str(tmp_path)}
        flags["model.model_name_or_path"] = checkpoint.path
        if method == "full" and kit.vision_prefixes:
            # A feature of a patch sums up to 9,408 weights, which one step of Adam moves all alike.
            flags["adam.vision_lr"] = 3e-5
        if trainer == "kd":
            flags["teacher.model_name_or_path"] = str(larger_teacher(name))
        config = resolve(dotted.replace(config_class(), flags))
        rows = rows_of(trainer, name)
        run_class.check(config, checkpoint, run_class.conversations(rows))
        torch.manual_seed(0)
        folder = RunFolder(path=tmp_path, name="stage", kind=trainer)
        return run_of(run_class, begun(config, checkpoint=checkpoint, folder=folder, steps=STEPS), rows)

    return run


@pytest.fixture(scope="module")
def linear_layers(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], set[str]]:
    """A function from a kit's name to the linear layers of its language model that adapters are for: not the output layer."""

    @cache
    def of(name: str) -> set[str]:
        kit, model = get_kit(name), make_actor(tiny_checkpoint(name)).model
        linear = {
            key
            for key, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and f"{key}.weight".startswith(kit.language_prefixes)
            and not f"{key}.weight".startswith(kit.untrained_prefixes)
            and not (name in ATTENTION_ALONE and ".mlp." in key)
        }
        output = {key for key in linear if model.get_submodule(key) is model.get_output_embeddings()}
        assert len(output) == 1
        return linear - output

    return of


def model_of(run: SupervisedRun) -> torch.nn.Module:
    """The model that is trained, under the names that it has in its checkpoint."""
    module = bare(run.engine)
    return module.model if isinstance(module, KitValueModel) else module


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights under the names of the checkpoint, with a reward model's head."""
    prefix = "model." if isinstance(module, KitValueModel) else ""
    return {name.removeprefix(prefix): weight.detach().clone() for name, weight in module.named_parameters()}


def reached(model: torch.nn.Module, name: str) -> set[str]:
    """The parameters that are trained; a kit may freeze some as it loads a model, but none of the language model."""
    kit = get_kit(name)
    known = {key: weight for key, weight in model.named_parameters() if not key.startswith(kit.untrained_prefixes)}
    trained = {key for key, weight in known.items() if weight.requires_grad}
    assert not {key for key in known.keys() - trained if key.startswith(kit.language_prefixes)}
    return trained


def loss_of(run: SupervisedRun, batches: Sequence[Any]) -> float:
    """The loss of an update on these micro-batches, without dropout."""
    with torch.no_grad():
        run.actor.eval()
        total = sum(run.terms(batch).loss.item() for batch in batches)
    run.actor.train()
    return total / sum(run.counts(batch).units for batch in batches)


def companions(run: SupervisedRun, batches: Sequence[Any]) -> list[torch.Tensor]:
    """What the models that are not trained give for these micro-batches, or hold."""
    if isinstance(run, KDRun):
        return list(weights_of(run.teacher.model).values())
    if isinstance(run, DPORun):
        return [run.reference.log_probs(batch.sides) for batch in batches]
    return []


def check_companions(run: SupervisedRun, method: str) -> None:
    """With adapters the reference is the model under them, in 4 bits where they are on 4 bits; so is the teacher."""
    if isinstance(run, DPORun):
        assert run.reference.without_adapters == (method != "full")
        assert (run.reference.actor is run.actor) == (method != "full")
    if isinstance(run, KDRun):
        assert bool(quantized_layers(run.teacher.model)) == (method == "qlora")


def check_saved(run: SupervisedRun, batches: Sequence[Any], *, loss: float) -> None:
    """The model that was written computes what the trained one does."""
    folder, trained = Path(run.config.ckpt.output_dir), run.actor
    is_rm = isinstance(run, RMRun)
    run.actor = make_value_model(folder, "reward", share_prefix=True) if is_rm else make_actor(folder)
    assert loss_of(run, batches) == pytest.approx(loss, rel=1e-5, abs=1e-5)
    # Of other adapters `test_kit_training` sees it, in double precision too.
    if isinstance(run, SFTRun) and run.config.ds.load_in_4bit:
        for sample in itertools.chain.from_iterable(batches):
            with torch.no_grad():
                ours, written = (
                    logits_of(actor.eval(), sample.token_ids[None], media=[sample.media])
                    for actor in (trained, run.actor)
                )
            assert (ours - written)[0, :-1][sample.loss_mask].abs().max() <= 1e-5
    run.actor = trained


def check_resumed(run: SupervisedRun, batches: Sequence[Any], *, loss: float) -> None:
    """What was saved under way brings back a model that has lost all of its weights, and the scales of those in 4 bits."""
    kept = weights_of(bare(run.engine))
    with torch.no_grad():
        for weight in bare(run.engine).parameters():
            weight.zero_()
        for layer in quantized_layers(bare(run.engine)).values():
            layer.weight.quant_state.absmax.zero_()
    assert run._resume() == STEPS
    found = weights_of(bare(run.engine))
    assert [name for name, weight in kept.items() if not torch.equal(found[name], weight)] == []
    assert loss_of(run, batches) == loss


@pytest.mark.parametrize(("trainer", "name", "method"), CASES)
def test_two_updates_change_what_is_trained_alone_and_what_they_save_is_loaded_again(
    trainer, name, method, started, linear_layers, tmp_path
):
    run = started(trainer, name, method)
    model = model_of(run)
    check_companions(run, method)
    batches = run._micro_batches(0)
    before, apart = weights_of(bare(run.engine)), companions(run, batches)
    if method == "full":
        expected = reached(model, name)
    else:
        layers = linear_layers(name)
        assert set(adapted_layers(model)) == layers
        assert set(quantized_layers(model)) == (
            {f"{key}.base_layer" for key in layers} if method == "qlora" else set()
        )
        # The second factor starts at zero, so that the first one has a gradient from the second step on.
        expected = {f"{key}.lora_{factor}.default.weight" for key in layers for factor in "AB"}
    if trainer == "rm":
        expected.add("head.weight")

    run.train(steps=STEPS)

    after = weights_of(bare(run.engine))
    assert {key for key, weight in after.items() if not torch.equal(weight, before[key])} == expected
    assert all(torch.equal(old, new) for old, new in zip(apart, companions(run, batches), strict=True))
    first, second = (json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    third = loss_of(run, batches)
    assert math.inf > first > second > third > 0
    check_saved(run, batches, loss=third)
    check_resumed(run, batches, loss=third)

"""What `lmm-r1 kits --derive` finds out about architectures without a kit, and what it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.kitless import KITLESS, build_kitless
from helpers.tables import table
from transformers import masking_utils

from lmm_r1.cli import derive, kits
from lmm_r1.cli.derive import Checks, Unconfirmed
from lmm_r1.config.shared import LoraConfig
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import kit_of
from lmm_r1.lmm_kits.derived import CAPABILITIES, CONFIG_KEY, Confirmation
from lmm_r1.models import loading
from lmm_r1.models.actor import KitActor, KitValueModel
from lmm_r1.models.loading import LoadSettings

# What the checks find.
VERDICTS: dict[str, dict[str, str]] = table("contracts/test_derived_kits", "verdicts")
# Checked in every test run.
ALWAYS = ("mistral3",)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: build_kitless(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of RL take minutes; tests/integration/test_derived_kit.py runs them."""

    def rl(self: Checks) -> str:
        raise Unconfirmed("not run here")

    monkeypatch.setattr(Checks, "rl", rl)


def without_rl(verdicts: dict[str, str]) -> dict[str, str]:
    """Return the verdicts of all checks but that of RL, without the distances, which differ between machines."""
    return {name: re.sub(r" \(by .*\)", "", verdict) for name, verdict in verdicts.items() if name != "rl"}


def verdicts_of(derived: dict[str, Confirmation]) -> dict[str, str]:
    """Return yes, or the reason why not."""
    return {name: "yes" if found.confirmed else found.reason for name, found in derived.items()}


def derive_into(folder: Path, model: Path) -> dict[str, str]:
    return verdicts_of(derive.derive(str(model), folder / "kit.json"))


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in KITLESS]
)
def test_the_checks_find_what_the_docs_say(name, model_of, no_engine, tmp_path):
    assert without_rl(derive_into(tmp_path, model_of(name))) == without_rl(VERDICTS[name])
    assert (tmp_path / "kit.json").exists() == (VERDICTS[name]["sft"] == "yes")


def test_placeholders_that_do_not_match_the_models_features_are_found(model_of, no_engine, tmp_path):
    model = shutil.copytree(model_of("mistral3"), tmp_path / "model")
    file = model / "processor_config.json"
    # One placeholder for each patch, of which the model joins four.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spatial_merge_size": 1}))
    found = derive_into(tmp_path, model)
    assert "the model does not run on what the processor makes" in found["sft"]
    assert "features" in found["sft"] or "tokens" in found["sft"]
    assert not (tmp_path / "kit.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{{- '[IMG]' -}}", "", "the chat template writes 0 tokens for an image"),
        (
            "<|im_start|>assistant\\n' -}}",
            "<|im_start|>model\\n' -}}",
            "in another way than it begins one to generate",
        ),
        ("{{- '<|im_end|>\\n' -}}", "{{- '\\n' -}}", "no response would end"),
    ],
)
def test_chat_templates_with_which_nothing_can_be_trained_are_found(old, new, reason, model_of, no_engine, tmp_path):
    model = shutil.copytree(model_of("mistral3"), tmp_path / "model")
    file = model / "chat_template.jinja"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert reason in derive_into(tmp_path, model)["sft"]


def test_an_attention_that_takes_a_packed_sequence_for_one_sample_is_found(model_of, no_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "use_packed_attention", lambda model: None)
    # By which transformers itself finds samples, from their positions.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    found = derive_into(tmp_path, model_of("mistral3"))
    assert found["sft"] == "yes"
    assert found["packed"].startswith("in one packed sequence, log-probs differ from those of each sample")
    assert found["shared_prefix"] == "needs packed"


def test_a_check_that_fails_in_an_unknown_way_leaves_its_capability_off(model_of, no_engine, monkeypatch, tmp_path):
    def break_down(*args: Any, **kwargs: Any) -> None:
        raise KeyError("layer 3")

    monkeypatch.setattr(derive, "adapted_layers", break_down)
    found = derive_into(tmp_path, model_of("mistral3"))
    assert found["lora"] == "the check ends with KeyError: 'layer 3'"
    assert found["packed"] == "yes"


def test_an_architecture_with_a_kit_needs_none(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="the architecture has a kit, qwen2_vl"):
        derive.derive(str(tiny_checkpoint("qwen2_vl")), tmp_path / "kit.json")


def test_the_command_prints_the_verdicts_and_ends_with_1_if_nothing_can_be_trained(
    model_of, no_engine, tmp_path, capsys, own_environment
):
    output = tmp_path / "kit.json"
    kits.main(["--derive", str(model_of("mistral3")), "--output", str(output)])
    printed = capsys.readouterr().out
    assert all(name in printed for name in CAPABILITIES)
    assert "not run here" in printed
    assert f"lmm-r1 --kit {output} COMMAND" in printed
    with pytest.raises(SystemExit, match="1"):
        kits.main(["--derive", str(model_of("paligemma")), "--output", str(output)])
    assert "No kit was written" in capsys.readouterr().out


@pytest.fixture(scope="module")
def saved(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function from capabilities that are off to a model that has its kit in its config."""

    def made(*off: str) -> str:
        folder = tmp_path_factory.mktemp("saved")
        model, processor = derive.write_small(str(model_of("mistral3")), folder)
        file = derive.Discovery(model, processor).kit_file()
        findings = {name: Confirmation(confirmed=name not in off, reason="not confirmed") for name in CAPABILITIES}
        setattr(model.config, CONFIG_KEY, {**file.data, "capabilities": {k: vars(v) for k, v in findings.items()}})
        model.save_pretrained(folder)
        return str(folder)

    return made


def settings(**given: Any) -> LoadSettings:
    return LoadSettings(attn_implementation="sdpa", param_dtype="fp32", max_len=256, **given)


@pytest.mark.parametrize(
    ("off", "given", "flag"),
    [
        ("lora", {"lora": LoraConfig(rank=4)}, "--ds.lora.rank 4"),
        ("freezing", {"freeze_visual_encoder": True}, "--actor.freeze_visual_encoder"),
        ("packed", {"packing_samples": True}, "--ds.packing_samples"),
    ],
)
def test_flags_for_what_is_not_confirmed_are_refused_with_the_reason(off, given, flag, saved):
    with pytest.raises(UserError, match=f"{flag}.*not confirmed"):
        KitActor(saved(off), settings(**given))
    KitActor(saved(), settings(**given))


def test_a_critic_is_refused(saved):
    with pytest.raises(UserError, match="a value head: mistral3 .*not checked"):
        KitValueModel(saved(), "critic", settings(), value_head_prefix="score")


@pytest.mark.parametrize("off", ["packed", "shared_prefix"])
def test_prompts_are_not_shared_if_that_is_not_confirmed(off, saved, caplog):
    actor = KitActor(saved(off), settings(share_prefix=True))
    assert (actor.packing_samples, "not confirmed" in caplog.text) == (False, True)


def test_models_saved_in_any_way_keep_their_kit(saved, tmp_path):
    folder = saved("rl")
    kit = kit_of(folder)
    actor = KitActor(folder, settings(lora=LoraConfig(rank=4)))
    processor = kit.load_processor(folder, trust_remote_code=False)
    actor.save(tmp_path, processor=processor, weights=actor.model.state_dict())
    assert kit_of(str(tmp_path)) == kit
    assert kit_of(str(tmp_path)).engine_refusal == "not confirmed"

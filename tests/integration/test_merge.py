"""`lmm-r1 merge` on what real runs left behind: it writes what the trainer itself saved, and tells what it cannot use."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from helpers.commands import ANSWERED, error_of, flags, tree, with_image, write_rows
from helpers.commands_here import run_here, run_in_ranks
from helpers.conversations import picture
from helpers.http_servers import hub_server
from safetensors.torch import load_file

from lmm_r1 import hub
from lmm_r1.cli.merge import main
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit

pytestmark = pytest.mark.slow
KIT = "qwen2_5_vl"
WEIGHTS = "model.safetensors"
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "ZeRO-1, LoRA": (1, {"ds.zero_stage": 1, "ds.lora.rank": 4, "ds.lora.alpha": 12}),
    "ZeRO-2": (1, {"ds.zero_stage": 2}),
    "ZeRO-3, LoRA": (2, {"ds.zero_stage": 3, "ds.lora.rank": 4}),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run of two steps left behind."""

    model: Path
    """The run folder, with the model that the trainer saved at the end."""
    checkpoint: Path
    """DeepSpeed's, in its own folder below the run folder."""


@pytest.fixture(scope="module")
def base(demo: Path) -> Path:
    return demo / "model"


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All runs, of texts and images; those of so many processes take place in the same ones."""
    folder = tmp_path_factory.mktemp("runs")
    picture(84, 56).save(folder / "picture.png")
    rows = write_rows(folder, *[ANSWERED, with_image("picture.png", base=ANSWERED)] * 4)
    settings: dict[str, object] = {
        "model.model_name_or_path": base,
        "data.dataset": rows,
        "data.max_len": 512,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "train.max_steps": 2,
        "ds.param_dtype": "fp32",
        "adam.lr": 1e-3,
        "lr_warmup_ratio": 0.0,
        "ckpt.save_steps": 1,
    }
    made = {}
    for count in (1, 2):
        own = {name: changes for name, (ranks, changes) in RUNS.items() if ranks == count}
        made |= {name: Trained(model=folder / name, checkpoint=folder / name / "checkpoints") for name in own}
        commands = [flags(settings | own[name] | {"ckpt.output_dir": folder / name}) for name in own]
        ended = run_in_ranks(commands, count=count, folder=folder / f"ranks of {count}")
        assert not any(rank.code for of_ranks in ended for rank in of_ranks), ended
    return made


def run_merge(*argv: object) -> str:
    """What the command prints; fails unless it ends well and says nothing else."""
    ended = run_here("merge", list(map(str, argv)), folder=Path.cwd())
    assert (ended.code, ended.stderr) == (0, "")
    return ended.stdout


def assert_same_model(folder: Path, expected: Path) -> None:
    """The folder's weights are those of the other bit by bit, and it has a config and a processor."""
    weights, wanted = load_file(folder / WEIGHTS), load_file(expected / WEIGHTS)
    assert set(weights) == set(wanted)
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
    assert {file.name for file in folder.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
    kit = get_kit(KIT)
    assert kit.load_processor(str(folder), trust_remote_code=False).chat_template
    configs = [json.loads((place / "config.json").read_text()) for place in (folder, expected)]
    assert configs[0] == configs[1]


def difference_said(printed: str) -> float:
    """The largest difference that merging made, as it is printed; the command fails if it is more than rounding."""
    return float(printed.partition("largest difference ")[2].split()[0])


def test_an_adapter_is_merged_into_what_the_trainer_saved(runs, base, tmp_path):
    run = runs["ZeRO-1, LoRA"]
    printed = run_merge("--adapter", run.model / "adapter", "--output", tmp_path / "merged")
    assert f"merged the adapter {run.model / 'adapter'} into {base}" in printed
    assert difference_said(printed) > 0
    assert f"{tmp_path / 'merged'}: " in printed
    assert_same_model(tmp_path / "merged", run.model)
    before, after = load_file(base / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    assert sum(not torch.equal(before[name], after[name]) for name in before) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_zero_2_checkpoint_becomes_what_the_trainer_saved(runs, base, tmp_path):
    run = runs["ZeRO-2"]
    printed = run_merge("--checkpoint", run.checkpoint, "--base", base, "--output", tmp_path / "merged")
    assert f"gathered the weights of {run.checkpoint / 'global_step2'}" in printed
    assert difference_said(printed) == 0
    assert_same_model(tmp_path / "merged", run.model)


def test_the_shards_of_two_processes_and_their_adapters_become_what_the_trainer_saved(runs, base, tmp_path):
    run = runs["ZeRO-3, LoRA"]
    printed = run_merge("--checkpoint", run.checkpoint, "--base", base, "--output", tmp_path / "merged")
    assert f"adapters of 14 layers: rank 4, alpha 8 ({run.model / 'run_config.yaml'})" in printed
    assert difference_said(printed) > 0
    assert_same_model(tmp_path / "merged", run.model)


def test_an_earlier_step_of_a_zero_1_checkpoint_with_adapters(runs, base, tmp_path, capfd):
    run = runs["ZeRO-1, LoRA"]
    last, first, halved = (tmp_path / name for name in ("last", "first", "halved"))
    argv = ["--base", str(base), "--no_check", "--checkpoint"]
    main([*argv, str(run.checkpoint), "--output", str(last)])
    assert "rank 4, alpha 12" in capfd.readouterr().out
    assert_same_model(last, run.model)
    main([*argv, str(run.checkpoint), "--tag", "global_step1", "--output", str(first)])
    main([*argv, str(run.checkpoint / "global_step1"), "--output", str(halved), "--lora_alpha", "6"])
    names = [name for name in load_file(base / WEIGHTS) if name.endswith("q_proj.weight")]
    assert len(names) == 2
    for name in names:
        original, one, two, half = (load_file(place / WEIGHTS)[name] for place in (base, first, last, halved))
        assert not torch.equal(one, two)
        assert not torch.equal(one, original)
        torch.testing.assert_close(half - original, (one - original) / 2, atol=1e-7, rtol=0)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function from flags to the sentence of the command, which leaves nothing behind in the output's place."""

    def said(*switches: str, **settings: object) -> str:
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        before = tree(place)
        sentence = error_of("merge", [*flags({"output": place / "merged"} | settings), *switches], capfd=capfd)
        assert tree(place) == before
        return sentence

    return said


def test_checkpoints_that_cannot_be_gathered_are_refused(refused, runs, base, tiny_checkpoint, tmp_path):
    whole, sharded = runs["ZeRO-2"], runs["ZeRO-3, LoRA"]
    assert "no such folder" in refused(checkpoint=tmp_path / "nowhere", base=base)
    assert "no file `latest`" in refused(checkpoint=base, base=base)
    assert "there are global_step1, global_step2" in refused(checkpoint=whole.checkpoint, base=base, tag="step9")
    (tmp_path / "ppo" / "_actor").mkdir(parents=True)
    assert f"give one of them: {tmp_path / 'ppo' / '_actor'}" in refused(checkpoint=tmp_path / "ppo", base=base)
    assert "Missing key(s) in state_dict" in refused(checkpoint=whole.checkpoint, base=tiny_checkpoint("llm"))

    copy = tmp_path / "copy"
    shutil.copytree(sharded.checkpoint, copy)
    settings = {"checkpoint": copy, "base": base}
    assert "no run_config.yaml above it" in refused(**settings)
    (copy / "run_config.yaml").write_text("train:\n  seed: 1\n")
    assert "no ds.lora in it" in refused(**settings)
    assert "cannot be read (No such file" in refused(**settings, run_config=tmp_path / "nowhere.yaml")
    (copy / "run_config.yaml").write_text("ds:\n  lora:\n    rank: 8\n    alpha: 16\n")
    assert "is of a run with --ds.lora.rank 8, and the adapters of" in refused(**settings)
    assert "no linear layer for the adapters of" in refused(
        checkpoint=copy, base=tiny_checkpoint("llm"), lora_alpha=16
    )
    shard = copy / "global_step2" / SHARD.replace("rank_0_", "rank_1_", 1)
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert "this ZeRO checkpoint cannot be read" in refused(**settings)
    shard.unlink()
    assert "but found 1 files" in refused(**settings)


def test_an_upload_makes_a_private_repository_and_commits_every_file(tmp_path):
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    with hub_server() as uploads:
        hub.check_uploadable("me/model", flag="--push_to_hub")
        assert hub.upload(folder, "me/model", private=True, flag="--push_to_hub").endswith("/me/model")
    assert uploads.made["visibility"] == "private"
    assert uploads.files == ["config.json", "tokenizer.json"]


def test_a_failed_upload_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"the upload of .* failed \(.*\); upload it with `hf upload me/model "):
        hub.upload(tmp_path, "me/model", private=True, flag="--push_to_hub")

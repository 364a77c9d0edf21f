"""Which checkpoints of a folder are whole, which go first, and what a kill at any operation on files leaves behind."""

import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.interrupted_writes import Interrupter, killed_at
from helpers.saved_checkpoints import complete_steps

from lmm_r1.host.checkpoint_folder import (
    begin,
    defect,
    evict,
    flush,
    mark_complete,
    read_latest,
    resume_point,
    saving_name,
    whole_checkpoints,
    write_latest,
)

RANKS = 3
NO_LIMIT = float("inf")


@pytest.fixture(scope="session")
def interrupter() -> Interrupter:
    return Interrupter()


def shard_names() -> list[str]:
    optim = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(RANKS)]
    return [*optim, "mp_rank_00_model_states.pt"]


def write_shard(file: Path, content: str) -> None:
    """A file as torch writes it, in two parts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("first", content)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("second", content * 100)


def write_checkpoint(folder: Path, tag: str, *, metric: float | None = None, session: str = "one") -> None:
    """Save a whole checkpoint that `latest` does not name yet."""
    begin(folder, tag)
    saving = folder / saving_name(tag)
    for name in shard_names():
        write_shard(saving / name, f"{tag} {session}")
    (saving / "metric.json").write_text(json.dumps({"metric_key": "accuracy", "metric_value": metric}))
    files = {name: flush(saving / name) for name in shard_names()}
    mark_complete(folder, tag, files=files, session=session)


def save(
    folder: Path,
    tag: str,
    *,
    metric: float | None = None,
    max_num: int = 99,
    max_mem: float = NO_LIMIT,
    session: str = "one",
) -> None:
    write_checkpoint(folder, tag, metric=metric, session=session)
    write_latest(folder, tag)
    evict(folder, saved=tag, max_num=max_num, max_mem=max_mem)


def save_together(folders: Sequence[Path], tag: str, *, max_num: int, session: str) -> None:
    """As policy and critic are saved: one after the other, and then both are settled."""
    for folder in folders:
        write_checkpoint(folder, tag, session=session)
    for folder in folders:
        write_latest(folder, tag)
        evict(folder, saved=tag, max_num=max_num, max_mem=NO_LIMIT)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_a_save_is_whole_once_it_has_its_marker_and_its_name(tmp_path):
    begin(tmp_path, "global_step2")
    saving = tmp_path / saving_name("global_step2")
    for name in shard_names():
        write_shard(saving / name, "2")
        assert complete_steps(tmp_path) == []
        assert resume_point([tmp_path]).tag is None
    mark_complete(tmp_path, "global_step2", files={name: flush(saving / name) for name in shard_names()}, session="a")
    assert complete_steps(tmp_path) == [2]
    assert read_latest(tmp_path) is None
    write_latest(tmp_path, "global_step2")
    assert (tmp_path / "latest").read_bytes() == b"global_step2"
    point = resume_point([tmp_path])
    assert (point.tag, point.passed_over) == ("global_step2", ())


@pytest.mark.parametrize("name", shard_names())
def test_a_checkpoint_that_lost_a_shard_is_torn(name, tmp_path):
    save(tmp_path, "global_step1")
    save(tmp_path, "global_step2")
    (tmp_path / "global_step2" / name).unlink()
    assert complete_steps(tmp_path) == [1]
    assert resume_point([tmp_path]).passed_over == (f"{tmp_path}/global_step2: {name} is missing",)


@pytest.mark.parametrize("name", shard_names())
def test_a_checkpoint_with_a_flipped_byte_is_named_and_the_one_before_is_taken(name, tmp_path):
    draw = random.Random(name)
    for step in (1, 2, 3):
        save(tmp_path, f"global_step{step}")
    for step in (3, 2):
        file = tmp_path / f"global_step{step}" / name
        torch.save({"weights": torch.arange(1000)}, file)
        content = bytearray(file.read_bytes())
        place = content.index(torch.arange(1000).numpy().tobytes()[:64]) + draw.randrange(8000)
        content[place] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        _mark(tmp_path / f"global_step{step}")
    point = resume_point([tmp_path])
    assert point.tag == "global_step1"
    assert [reason.split(" is ")[0] for reason in point.passed_over] == [
        f"{tmp_path}/global_step3: {name}",
        f"{tmp_path}/global_step2: {name}",
    ]


def _mark(checkpoint: Path) -> None:
    """Let the marker have the sizes of the shards."""
    marker = json.loads((checkpoint / "complete.json").read_text())
    marker["files"] = {name: (checkpoint / name).stat().st_size for name in marker["files"]}
    (checkpoint / "complete.json").write_text(json.dumps(marker))


def test_a_checkpoint_with_half_a_shard_or_an_unreadable_marker_is_torn(tmp_path):
    for tag in ("global_step1", "global_step2", "global_step3"):
        save(tmp_path, tag)
    shard = tmp_path / "global_step2" / shard_names()[0]
    size = shard.stat().st_size
    os.truncate(shard, size - 7)
    (tmp_path / "global_step3/complete.json").write_text("")
    assert complete_steps(tmp_path) == [1]
    assert defect(tmp_path, "global_step2") == f"{shard.name} has {size - 7} bytes instead of {size}"
    assert defect(tmp_path, "global_step3") == "its complete.json cannot be read"


def test_a_checkpoint_of_openrlhf_counts_once_latest_names_it(tmp_path):
    for name in shard_names():
        write_shard(tmp_path / "global_step4" / name, "4")
    assert defect(tmp_path, "global_step4") == "it has no complete.json"
    write_latest(tmp_path, "global_step4")
    assert complete_steps(tmp_path) == [4]
    assert resume_point([tmp_path]).tag == "global_step4"


@pytest.mark.parametrize(
    ("latest", "reason"),
    [
        (None, "latest is missing"),
        ("", "latest is empty"),
        ("\n", "latest is empty"),
        ("global_step9", "global_step9: it is not there"),
        ("final", "latest names 'final', which is no checkpoint"),
        ("../global_step1", "latest names '../global_step1', which is no checkpoint"),
    ],
)
def test_a_useless_latest_gives_way_to_the_newest_whole_checkpoint(latest, reason, tmp_path):
    for tag in ("global_step2", "global_step10"):
        save(tmp_path, tag)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    point = resume_point([tmp_path])
    assert point.tag == "global_step10"
    assert point.passed_over == (f"{tmp_path}/{reason}",)


def test_policy_and_critic_go_on_from_the_newest_step_that_both_have(tmp_path):
    policy, critic = folders = [tmp_path / "_actor", tmp_path / "_critic"]
    for step in (1, 2):
        save_together(folders, f"global_step{step}", max_num=3, session="one")
    assert (resume_point(folders).tag, resume_point(folders).passed_over) == ("global_step2", ())
    save(policy, "global_step3")
    point = resume_point(folders)
    assert point.tag == "global_step2"
    assert point.passed_over == (f"{policy}/global_step3, which is not there for every model",)
    shutil.rmtree(critic / "global_step2")
    assert resume_point(folders).tag == "global_step1"
    shutil.rmtree(critic)
    assert resume_point(folders).tag is None


@pytest.mark.parametrize(
    ("metrics", "gone"),
    [
        ({1: None, 2: None, 3: None}, 1),
        ({1: 0.5, 2: None, 3: None}, 2),
        ({1: 0.5, 2: 0.25, 3: 0.75}, 2),
        ({1: 0.5, 2: 0.5, 3: 0.5}, 1),
        ({1: 1 / 3, 2: 0.9, 3: float("nan")}, 3),
    ],
)
def test_those_without_a_metric_go_first_then_the_worst_then_the_oldest(metrics, gone, tmp_path):
    for step, metric in metrics.items():
        save(tmp_path, f"global_step{step}", metric=metric)
        os.utime(tmp_path / f"global_step{step}", (step, step))
    # The worst of all is the one that was just saved, and `latest` names it.
    save(tmp_path, "global_step4", metric=0.0, max_num=3)
    assert complete_steps(tmp_path) == [step for step in (1, 2, 3, 4) if step != gone]


def every_kill(
    interrupter: Interrupter, folder: Path, action: Callable[[Path], object], check: Callable[[Path], None]
) -> int:
    """Kill the action before each of its operations, each time on a copy of the folder, and return their number."""
    for at in range(10_000):
        copy = folder.with_name(f"{folder.name}-{at}")
        shutil.copytree(folder, copy)
        killed = killed_at(interrupter, lambda copy=copy: action(copy), at=at)
        check(copy)
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it has no end")


@pytest.mark.parametrize("earlier", [1, 2], ids=["one before", "a torn save and a torn eviction before"])
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint_and_is_made_up_for(earlier, tmp_path, interrupter):
    folder = tmp_path / "run"
    save(folder, "global_step1")
    if earlier == 2:
        write_shard(folder / saving_name("global_step2") / shard_names()[0], "half")
        write_shard(folder / ".deleting-global_step0.0" / shard_names()[0], "half")
    seen = set()

    def check(copy: Path) -> None:
        point = resume_point([copy])
        assert point.tag in ("global_step1", "global_step2")
        seen.add(point.tag)
        assert point.tag in whole_checkpoints(copy)
        # The next session makes the same save, or the next one.
        save(copy, f"global_step{int(point.tag[-1]) + 1}", max_num=1, session="two")
        assert kept(copy) == [f"global_step{int(point.tag[-1]) + 1}"]

    count = every_kill(interrupter, folder, lambda copy: save(copy, "global_step2", max_num=1), check)
    assert count > 15
    assert seen == {"global_step1", "global_step2"}


def test_a_killed_save_of_two_models_leaves_a_step_that_both_have(tmp_path, interrupter):
    folder = tmp_path / "run"

    def both(place: Path) -> list[Path]:
        return [place / "_actor", place / "_critic"]

    save_together(both(folder), "global_step1", max_num=1, session="one")
    seen = set()

    def check(copy: Path) -> None:
        point = resume_point(both(copy))
        seen.add(point.tag)
        first, second = map(whole_checkpoints, both(copy))
        assert first[point.tag].session == second[point.tag].session
        step = int(point.tag[-1]) + 1
        save_together(both(copy), f"global_step{step}", max_num=1, session="two")
        assert [kept(place) for place in both(copy)] == [[f"global_step{step}"]] * 2

    def action(copy: Path) -> None:
        save_together(both(copy), "global_step2", max_num=1, session="one")

    assert every_kill(interrupter, folder, action, check) > 30
    assert seen == {"global_step1", "global_step2"}

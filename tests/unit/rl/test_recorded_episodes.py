"""Which episodes of a step are recorded, with which pictures, and that no others bring any."""

from dataclasses import replace

import pytest
import ray
from helpers.conversations import message, picture, row
from helpers.rl_steps import small_run
from helpers.samples import episode
from PIL import Image
from rich.console import Console

from lmm_r1.data.sample import CallOutcome, Cut, CutImage, Said
from lmm_r1.generation.media_store import put_pictures
from lmm_r1.records.rollouts import ROLLOUTS_FILE, read_rollouts
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl.records import Recorder, recorded_samples
from lmm_r1.rl.rollouts import group_settings

ROW = row(message("user", picture(8, 6), "?"), answer="2")
CUT = Cut(picture=0, name="original_image", box=(2, 0, 6, 6), size=(8, 6))
LOOK = Said("assistant", "crop", calls=(CallOutcome(tool="crop", outcome="done"),))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [({}, False), ({"train__agent": "crop"}, True), ({"train__agent": "crop", "logger__rollouts_per_step": 0}, False)],
)
def test_engines_are_asked_for_pictures_where_episodes_are_recorded(flags, wanted):
    assert group_settings(small_run(**flags)).pictures is wanted


def test_groups_are_recorded_whole_those_with_pictures_first():
    late, early = (episode(Said("assistant", str(number)), number=number) for number in (1, 0))
    seen = replace(early, played=replace(early.played, pictures="ref"))
    groups = [[late, early], [late, seen], [late, early]]
    for count in (4, 5):
        chosen = list(recorded_samples(groups, count=count))
        assert [(group, sample.response, sample.played.pictures) for group, sample in chosen] == [
            (0, "0", "ref"),
            (0, "1", None),
            (1, "0", None),
            (1, "1", None),
        ]


def recorder(folder: RunFolder, *, count: int) -> Recorder:
    return Recorder(config=small_run(logger__rollouts_per_step=count), folder=folder, total_steps=1, console=Console())


def test_an_episode_is_recorded_with_the_pictures_that_stayed_with_the_engine(tmp_path, monkeypatch):
    stored = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or "ref")
    monkeypatch.setattr(ray, "get", lambda ref: stored[0])
    seen = Said("user", "This is observation_1: <image>", (CutImage(picture(4, 6), cut=CUT),))
    sample = episode(
        LOOK,
        seen,
        Said("assistant", "2", rewards=(("step", 0.5),)),
        of=ROW,
        reward=1.0,
        parts={"accuracy": 1.0, "turns": 2.0, "tool_calls": 1.0},
        counts={"tool_calls": 1},
        end="turns",
        shown=(message("system", "Crop."), *ROW.messages),
    )
    folder = RunFolder(path=tmp_path, name="rl", kind="rl")
    folder.open("")
    (generation,) = recorder(folder, count=1).rollouts(3, [put_pictures([sample])])

    (found,) = read_rollouts(tmp_path / ROLLOUTS_FILE).read([0])
    assert [message.role for message in found.messages] == ["system", "user"]
    assert [turn.role for turn in found.said] == ["assistant", "user", "assistant"]
    assert found.said[0].calls == LOOK.calls
    text, part = found.said[1].parts
    assert (text.value, part.cut) == ("This is observation_1: ", CUT)
    assert Image.open(tmp_path / part.value).tobytes() == picture(4, 6).tobytes()
    assert found.said[2].rewards == {"step": 0.5}
    assert (found.step, found.end, found.counts, found.masked) == (3, "turns", {"tool_calls": 1.0}, False)
    assert generation.response == "assistant: crop\n\nuser: This is observation_1: <image>\n\nassistant: 2"
    assert generation.ended == "out of turns"

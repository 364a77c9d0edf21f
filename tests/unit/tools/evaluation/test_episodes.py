"""Episodes of an evaluation: their figures, worked out by hand, and how they are shown."""

import json
from pathlib import Path

import pytest
from helpers.conversations import picture
from helpers.run_folders import judged

from lmm_r1.agents.environment import load_environment
from lmm_r1.data.sample import EpisodeResult
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, PlayedEpisode, ShownTurn, read_responses, write_responses
from lmm_r1.tools.evaluation.board import CheckpointResponses, MeasuredFile, board_record, build_board, print_board
from lmm_r1.tools.evaluation.page import build_page
from lmm_r1.tools.evaluation.scores import (
    check_reward_parts,
    default_verifiers,
    environment_scores,
    episode_scores,
    summarize,
)

NASTY = '</p><script>alert("x")</script>'


def played(right: bool, turns: int, *, end: str = "over", images: tuple[str, ...] = (), **changes) -> JudgedResponse:
    said = [ShownTurn(role="assistant", text=f"turn {number} {NASTY}") for number in range(turns)]
    if images:
        said.insert(1, ShownTurn(role="user", text="Here: <image> so", images=images))
    episode = PlayedEpisode(
        end=end,
        turns=turns,
        shown_images=turns - 1,
        rewards={"found": float(right)},
        counts={"tool_calls": turns - 1},
        said=tuple(said),
    )
    return judged(right, episode=episode, **changes)


# Two rows of two samples: right in 1 turn and wrong in 3; right in 2 turns and right in 3, at the limit.
EPISODES = [
    played(True, 1, index=0, sample=0),
    played(False, 3, index=0, sample=1, end="turns"),
    played(True, 2, index=1, sample=0),
    played(True, 3, index=1, sample=1, end="turns"),
]


def test_what_was_solved_within_so_many_turns():
    scores = summarize(EPISODES, verifiers=["math"], ks=[1, 2], most_turns=3)
    within = scores.verifiers["math"].within_turns
    assert {turns: found.mean for turns, found in within.items()} == {1: 0.25, 2: 0.5, 3: 0.75}
    # Rows' means are 1/2 and 0: their standard deviation over the root of 2 is 1/4.
    assert within[1].standard_error == pytest.approx(0.25)
    assert within[2].standard_error == pytest.approx(0.0)
    assert within[3].mean == scores.verifiers["math"].accuracy.mean


def test_the_means_of_episodes_and_how_they_ended():
    scores = episode_scores(EPISODES)
    assert (scores.turns, scores.shown_images, scores.counts) == (2.25, 1.25, {"tool_calls": 1.25})
    assert scores.rewards == {"found": 0.75}
    assert scores.ends == {"over": 0.5, "turns": 0.5, "images": 0.0, "tokens": 0.0}
    assert episode_scores([judged()]) is None


def board(base=EPISODES, other=(), ks=(1, 2)):
    file = MeasuredFile(name="held_out", source="rows.jsonl", verifiers=("math",), ks=ks)
    checkpoints = [CheckpointResponses(name="base", path="m", files={"held_out": base})]
    if other:
        checkpoints.append(CheckpointResponses(name="plain", path="m1", files={"held_out": other}))
    return build_board(
        files=[file], checkpoints=checkpoints, baseline="base", resamples=10, seed=0, settings={"agent": "crop"}
    )


def test_the_record_has_them_and_that_of_single_responses_has_no_word_of_them():
    single = [judged(index=index, sample=sample, checkpoint="plain") for index in (0, 1) for sample in (0, 1)]
    found = json.loads(json.dumps(board_record(board(other=single))))
    played_files, plain = (found["checkpoints"][place]["files"]["held_out"] for place in (0, 1))
    assert played_files["episodes"]["ends"]["turns"] == 0.5
    assert played_files["verifiers"]["math"]["within_turns"]["2"]["mean"] == 0.5
    assert "episodes" not in plain
    assert "within_turns" not in plain["verifiers"]["math"]


def test_the_terminal_tells_of_episodes(capsys):
    print_board(board())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Checkpoint turns images tool calls found over out of turns out of images out of tokens" in lines
    assert "base 2.25 1.25 1.25 0.75 50.0 50.0 0.0 0.0" in lines


def test_the_page_shows_the_turns_with_their_pictures_and_obeys_none(tmp_path):
    picture(20, 20).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("secret")
    one = played(True, 2, images=(str(tmp_path / "a.png"),), index=0)
    two = played(True, 2, images=(str(tmp_path / "b.png"),), index=1)
    gone = played(True, 2, images=(str(tmp_path / "c.png"),), index=2)
    page = build_page(board([one, two, gone], ks=(1,)))
    assert page.count('<img src="data:image/png;base64,') == 1
    # What is no picture, or gone, keeps its mark.
    assert page.count("&lt;image&gt;") == 2
    assert "secret" not in page
    assert "<script" not in page
    assert "Right within so many turns" in page
    assert "2 turns, over, tool calls 1, found 1" in page
    assert "agent crop" in page


def test_a_file_of_responses_keeps_episodes_and_its_pictures_lie_below_it(tmp_path):
    path = tmp_path / "scores.responses.jsonl"
    one = played(True, 2, images=(str(tmp_path / "scores.images" / "a.png"),))
    write_responses(path, [one, judged(index=1)], append=False)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["episode"]["said"][1]["images"] == ["scores.images/a.png"]
    assert "episode" not in second
    assert read_responses(path) == [one, judged(index=1)]
    first["episode"]["said"][1]["images"] = ["../../etc/passwd"]
    path.write_text(json.dumps(first) + "\n")
    with pytest.raises(UserError, match="line 1: the pictures of an episode must be files below the folder"):
        read_responses(path)


def test_a_part_of_the_environments_reward_judges():
    one = EpisodeResult(end="over", images=0, rewards={"solved": 1.0, "valid_moves": 0.25}, counts={}, said=())
    [score] = environment_scores("agent:valid_moves", [one])
    assert (score.score, score.parts) == (0.25, {"valid_moves": 0.25})
    sokoban, crop = load_environment("sokoban"), load_environment("crop")
    assert default_verifiers(sokoban, otherwise="math") == ("agent:solved",)
    assert default_verifiers(crop, otherwise="math") == ("math",)
    check_reward_parts(["math", "agent:solved"], sokoban)
    with pytest.raises(
        UserError, match="--reward agent:solvd: the parts that sokoban gives are solved, boxes_on_goals"
    ):
        check_reward_parts(["agent:solvd"], sokoban)
    with pytest.raises(UserError, match="the parts that crop gives are none"):
        check_reward_parts(["agent:solved"], crop)


def test_rows_without_an_answer_are_taken_where_the_environment_judges(tmp_path):
    from lmm_r1.config.evaluate import EvaluateConfig
    from lmm_r1.tools.evaluation.rows import file_rows

    rows = Path(tmp_path / "rows.jsonl")
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}], "state": "#"}) + "\n")
    assert len(file_rows("a", str(rows), config=EvaluateConfig(), defaults=("agent:solved",)).rows) == 1
    with pytest.raises(UserError, match="answer"):
        file_rows("a", str(rows), config=EvaluateConfig())

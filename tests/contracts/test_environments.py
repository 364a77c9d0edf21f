"""What every environment must keep to, whatever a policy writes."""

import asyncio

import pytest
from helpers.environments import malformed_turns
from helpers.episodes import answers_of, coordinates_image, image_row, row_of, text_of, turn

from lmm_r1.agents.calls import TOOL_BLOCK
from lmm_r1.agents.environment import ENVIRONMENTS, Answered, Environment, load_environment
from lmm_r1.agents.tool_environment import COUNTS, CropEnvironment, ToolEnvironment, zoom_tool
from lmm_r1.data.messages import ImagePart, Row, TextPart

TURNS = 200
SEED = 11
# Of an environment whose rows are its own.
LEVEL = "#####\n#@$.#\n#####"
ROWS: dict[str, Row] = {
    "sokoban": row_of(state=LEVEL),
    "sokoban-plan": row_of(state=LEVEL),
}


@pytest.fixture(params=list(ENVIRONMENTS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def environment(name: str) -> Environment:
    return load_environment(name)


@pytest.fixture
def asked(name: str) -> Row:
    return ROWS.get(name, image_row(coordinates_image(60, 40)))


def told(answered: Answered) -> list[object]:
    """What an answer says, in a form that can be compared."""
    parts = [
        part.text if isinstance(part, TextPart) else (part.source.tobytes(), part.min_pixels, part.max_pixels)
        for part in answered.shown
    ]
    return [parts, answered.role, answered.prefill, dict(answered.rewards), dict(answered.counts)]


async def answers_to_all(environment: Environment, asked: Row, texts: list[str]) -> list[Answered]:
    """Answers to all turns; where an episode is over, another one goes on."""
    answers: list[Answered] = []
    episode = environment.begin(asked, seed=0)
    for number, text in enumerate(texts):
        answers.append(await episode.answer(turn(text, number=number, ended=number % 3 > 0)))
        if answers[-1].is_over:
            await episode.close()
            episode = environment.begin(asked, seed=number)
    await episode.close()
    return answers


class BlockTools(ToolEnvironment):
    """r1_vlm's way to write calls, and two of them in a turn."""

    name = "block"
    stops = ()
    formats = (TOOL_BLOCK,)
    calls_per_turn = 2


@pytest.mark.parametrize("name", [*ENVIRONMENTS, "block", "zoom"])
def test_malformed_turns_are_always_answered(name: str, asked: Row):
    made = {"block": BlockTools, "zoom": lambda: CropEnvironment(tools=[zoom_tool()], coordinates="relative")}
    environment = made[name]() if name in made else load_environment(name)
    texts = list(malformed_turns(TURNS, seed=SEED))
    answers = asyncio.run(answers_to_all(environment, asked, texts))
    assert len(answers) == len(texts) == TURNS
    for text, answered in zip(texts, answers, strict=True):
        assert all(isinstance(part, (TextPart, ImagePart)) for part in answered.shown)
        # A turn that is repeated to the policy must bring no special tokens or placeholders.
        assert "<|" not in text_of(answered), text
        assert "\x00" not in text_of(answered), text
        assert all(isinstance(count, int) and count >= 0 for count in answered.counts.values())
        assert set(answered.counts) <= set(environment.counts)
        assert set(answered.rewards) <= set(environment.rewards)
    assert not set(environment.counts) & set(environment.rewards), "each name is logged once"
    derived = environment.derived(dict.fromkeys(environment.counts, 0.0))
    assert derived.keys() == environment.derived(dict.fromkeys(environment.counts, 3.0)).keys()
    assert not derived.keys() & {*environment.counts, *environment.rewards}


@pytest.mark.parametrize(("name", "tag"), [("crop", "grounding"), ("tool", "tool_call")])
def test_every_call_is_counted_once(name: str, tag: str):
    environment = load_environment(name)
    texts = list(malformed_turns(TURNS, seed=SEED + 1, tags=(tag,)))
    answers = asyncio.run(answers_to_all(environment, image_row(coordinates_image(60, 40)), texts))
    sums = dict.fromkeys(COUNTS, 0)
    for answered in answers:
        assert set(answered.counts) == set(COUNTS)
        calls, malformed, failed = (answered.counts[count] for count in COUNTS)
        assert calls == (0 if answered.is_over else 1)
        has_image = any(isinstance(part, ImagePart) for part in answered.shown)
        assert calls == malformed + failed + has_image
        sums = {count: sums[count] + answered.counts[count] for count in COUNTS}
    # The turns are worth asking: nearly all hold a call, most of these are wrong, and no tool fails over one.
    assert sums["tool_calls"] > TURNS * 0.9
    assert TURNS * 0.7 < sums["malformed_calls"] < sums["tool_calls"]
    assert sums["failed_calls"] == 0


def test_the_same_turns_are_answered_the_same(environment: Environment, asked: Row):
    texts = list(malformed_turns(20, seed=SEED + 2))
    first, second = (asyncio.run(answers_of(environment, asked, texts, seed=5)) for _ in range(2))
    assert [told(one) for one in first] == [told(one) for one in second]


def test_episodes_that_go_on_beside_one_another_share_no_state(environment: Environment, asked: Row):
    plays = [list(malformed_turns(20, seed=SEED + 3 + number)) for number in range(8)]

    async def together() -> list[list[Answered]]:
        return await asyncio.gather(
            *(answers_of(environment, asked, texts, seed=number) for number, texts in enumerate(plays))
        )

    alone = [asyncio.run(answers_of(environment, asked, texts, seed=number)) for number, texts in enumerate(plays)]
    beside = asyncio.run(together())
    assert [[told(one) for one in answers] for answers in beside] == [
        [told(one) for one in answers] for answers in alone
    ]


def test_the_row_that_is_shown_keeps_what_the_row_asks(environment: Environment, asked: Row):
    before = repr(asked)
    shown = environment.shown_row(asked)
    assert (shown.answer, shown.location, shown.columns) == (asked.answer, asked.location, asked.columns)
    assert shown.messages[-1].role == asked.messages[-1].role
    assert repr(asked) == before
    assert shown == environment.shown_row(asked)


def test_branches_of_an_episode_go_on_by_themselves_from_where_it_was(environment: Environment, asked: Row):
    begun, one, other = (list(malformed_turns(30, seed=SEED + 20 + number)) for number in range(3))

    async def branched() -> list[list[Answered]]:
        trunk = environment.begin(asked, seed=0)
        for number, text in enumerate(begun):
            await trunk.answer(turn(text, number=number))
        branch = trunk.branch()
        answers = []
        for number, texts in enumerate(zip(one, other, strict=True), len(begun)):
            turns = zip((trunk, branch), texts, strict=True)
            answers.append([await episode.answer(turn(text, number=number)) for episode, text in turns])
        for episode in (branch, trunk):
            await episode.close()
        return answers

    plain = [asyncio.run(answers_of(environment, asked, begun + texts))[len(begun) :] for texts in (one, other)]
    assert [[told(answer) for answer in turns] for turns in asyncio.run(branched())] == [
        [told(answer) for answer in turns] for turns in zip(*plain, strict=True)
    ]

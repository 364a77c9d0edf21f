"""Files in OpenRLHF's form on a kit whose tokens are characters: what they are given, and what is made of what they return."""

import sys
from functools import partial

import pytest
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PATCHES, PLACEHOLDER, CharacterTokenizer
from helpers.conversations import message, row
from helpers.scripted_engines import TalkingEngine, play_group
from helpers.tables import table

from lmm_r1.agents.openrlhf_agent import ExecutorAgent, agent_class, load_agent
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.sample import Said
from lmm_r1.errors import UserError
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.executors import ExecutorRollout
from lmm_r1.generation.request import EngineWeights

PROMPT = row(message("user", "1+1?"), answer="2")
PROMPT_IDS = [*b"u1+1?", END, NEWLINE, ord("a")]
PICTURED = row(message("user", IMAGE, "?"), answer="2")
HURRIED = AgentConfig(max_turns=4, max_images=2, answer_s=0.3)

STEPS = """
import time

import torch
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

SEEN = []


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.steps = 0

    async def reset(self, states, **kwargs):
        SEEN.append(dict(states))
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        SEEN.append(dict(states))
        self.steps += 1
        if self.steps == 1:
            LATER
            return {
                "rewards": torch.tensor(0.5),
                "environment_feedback": "\\nu\\x02\\x03\\x01\\na",
                "environment_images": [Image.new("RGB", (6, 5))],
                "done": False,
                "sampling_params": states["sampling_params"],
            }
        return {
            "rewards": torch.tensor([1.0]),
            "scores": torch.tensor(0.25),
            "environment_feedback": "\\n\\x01\\n",
            "done": torch.tensor(True),
            "extra_logs": {"step_count": self.steps, "both": torch.tensor([[3.0, 4.0]])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
EXECUTES = """
import asyncio

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    engine = None

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        self.engine = self.engine or llm_engine
        ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        shown, ranges, log_probs = list(images or []), [], []
        for feedback in ("!", None):
            media = {"image": list(shown)} if shown else None
            output = await self.engine.generate(ids, sampling_params, multi_modal_data=media)
            part = output.outputs[0]
            start, ids = len(ids), [*ids, *part.token_ids]
            ranges.append((start, len(ids)))
            if feedback:
                ids = [*ids, *hf_tokenizer(feedback, add_special_tokens=False)["input_ids"]]
        result = {
            "prompt": prompt,
            "label": label,
            "observation_tokens": ids,
            "action_ranges": ranges,
            "rollout_log_probs": None,
            "truncated": False,
            "reward": 1.5,
            "scores": 0.5,
            "extra_logs": {"calls": 2},
        }
        CHANGED
        return result
"""

LOOKS_AGAIN = EXECUTES.replace(
    "                ids = [*ids, *hf_tokenizer(feedback",
    "                shown.append(shown[0].resize((7, 7)))\n                ids = [*ids, 2, *hf_tokenizer(feedback",
)


@pytest.fixture
def agent(tmp_path):
    """A function from a file's text to its agent."""

    def load(text, **replaced):
        for mark, code in {"LATER": "pass", "CHANGED": "pass", **replaced}.items():
            text = text.replace(mark, code)
        path = tmp_path / "agent_func.py"
        path.write_text(text)
        return load_agent(str(path))

    return load


def seen():
    return sys.modules["agent_module"].SEEN


def play(agent, *turns, prompt=PROMPT, **more):
    engine = TalkingEngine(*turns)
    rollout = ExecutorRollout if isinstance(agent, ExecutorAgent) else EpisodeRollout
    return play_group(partial(rollout, environment=agent), engine, prompt, **more), engine


def test_steps_are_turns_of_an_episode(agent):
    (sample,), engine = play(agent(STEPS), "5", "2")
    shown = [NEWLINE, ord("u"), *[PLACEHOLDER] * PATCHES, AFTER_IMAGE, END, NEWLINE, ord("a")]
    assert sample.token_ids == [*PROMPT_IDS, ord("5"), END, *shown, ord("2"), END]
    assert engine.requests[1][0]["multi_modal_data"]["image"][0].size == (6, 5)
    assert (sample.played.end, sample.response) == ("over", "2")
    # Rewards are summed; the last scores and logs count.
    assert (sample.scored.reward, sample.scored.score) == (1.5, 0.25)
    assert sample.played.logs == {"step_count": 2.0, "both": 3.0}
    begun, first, second = seen()
    assert begun == {"observation": "u1+1?\x01\na", "label": "2"}
    assert {name: first[name] for name in ("observation_text", "action_text", "label")} == {
        "observation_text": "u1+1?\x01\na",
        "action_text": "5",
        "label": "2",
    }
    assert first["sampling_params"].max_tokens == 4
    assert second["observation_text"] == "u1+1?\x01\na5\nu\x02\x03\x01\na"


def test_episodes_of_a_group_have_agents_of_their_own(agent):
    samples, _ = play(agent(STEPS), "5", "5", "2", "2", n_samples=2)
    assert [len(sample.generated) for sample in samples] == [2, 2]


@pytest.mark.parametrize(
    ("code", "told"), table("generation/openrlhf_agents", "an_agent_that_fails_costs_that_episode_alone")
)
def test_an_agent_that_fails_costs_that_episode_alone(agent, caplog, code, told):
    (sample,), _ = play(agent(STEPS, LATER=code), "5", limits=HURRIED)
    assert (sample.played.end, sample.scored.parts["environment_failed"]) == ("failed", 1.0)
    assert sample.token_ids == [*PROMPT_IDS, ord("5"), END]
    assert told in caplog.text


def test_what_an_executor_returns_is_made_of_what_the_engine_read_and_generated(agent):
    (sample,), engine = play(agent(EXECUTES), "5", b"12")
    assert sample.token_ids == [*PROMPT_IDS, ord("5"), END, ord("!"), *b"12"]
    assert [segment.kind for segment in sample.segments] == ["prompt", "generated", "observation", "generated"]
    assert [value for value in sample.log_probs if value] == [-53.0, -1.0, -49.0, -50.0]
    assert engine.prompts == [PROMPT_IDS, sample.token_ids[:-2]]
    assert (sample.scored.reward, sample.scored.score, sample.finish_reason) == (1.5, 0.5, "length")
    assert (sample.played.end, sample.played.logs) == ("over", {"calls": 2.0})
    assert sample.played.said == (Said("assistant", "5"), Said("user", "!"), Said("assistant", "12"))
    # It is asked for what it asked for, and for what training needs.
    parameters = engine.requests[0][1]
    assert (parameters.n, parameters.max_tokens, parameters.stop_token_ids, parameters.logprobs) == (1, 4, [END], 1)


def test_images_of_the_row_and_of_later_prompts_are_trained_on(agent):
    stored = []
    processor = CharacterTokenizer()
    (sample,), engine = play(agent(LOOKS_AGAIN), "5", "2", prompt=PICTURED, stored=stored, processor=processor)
    behind = len(sample.segments[0].token_ids) + 2
    assert sample.segments[2].token_ids == (PLACEHOLDER,) * PATCHES + (ord("!"),)
    assert [(item.start, item.key) for item in sample.media] == [(0, "object 1"), (behind, "object 2")]
    assert stored == [{"pixels": 1}, {"pixels": 1}]
    assert (sample.played.images, sample.played.said[1].text) == (1, "<image>!")
    assert [image.size for image in engine.requests[1][0]["multi_modal_data"]["image"]] == [IMAGE.size, (7, 7)]


class UpdatedEngine(TalkingEngine):
    """Gets new weights when its second turn has one token."""

    def __init__(self, *turns, weights):
        super().__init__(*turns)
        self.weights = weights

    async def generate(self, request, parameters, request_id):
        if self.requests:
            self.weights.replaced({request_id: {0: 1}})
        async for output in super().generate(request, parameters, request_id):
            yield output


def test_each_token_that_an_executor_asks_for_has_the_version_of_the_weights_that_sampled_it(agent):
    weights = EngineWeights(version=7)
    engine = UpdatedEngine("5", b"12", weights=weights)
    rollout = partial(ExecutorRollout, environment=agent(EXECUTES), weights=weights)
    (sample,) = play_group(rollout, engine, PROMPT)
    assert [segment.weights for segment in sample.generated] == [((7, 2),), ((7, 1), (8, 1))]
    assert sample.weights == ((7, 3), (8, 1))


@pytest.mark.parametrize(
    ("code", "told"),
    table("generation/openrlhf_agents", "an_episode_that_is_not_what_was_generated_is_not_learnt_from"),
)
def test_an_episode_that_is_not_what_was_generated_is_not_learnt_from(agent, caplog, code, told):
    # The last turn is that of the episode which takes its place.
    (sample,), _ = play(agent(EXECUTES, CHANGED=code), "5", "2", "7", limits=HURRIED)
    assert (sample.played.end, sample.masked) == ("failed", True)
    assert sample.token_ids == [*PROMPT_IDS, ord("7"), END]
    assert told in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", r"the file cannot be imported \(ZeroDivisionError"),
        ("x = 1", "the file defines no class AgentExecutor"),
        ("class AgentExecutor:\n    pass\n", "that is an AgentExecutorBase"),
        ("from openrlhf.utils.agent import AgentExecutorBase as B\n\nclass AgentExecutor(B):\n    pass\n", "execute"),
        (STEPS.replace("__init__(self)", "__init__(self, size)"), r"AgentExecutor\(\) cannot be created \(TypeError"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(agent, text, said):
    with pytest.raises(UserError, match=f"--train.agent_func_path .*agent_func.py: .*{said}"):
        agent(text)
    with pytest.raises(UserError, match="no such file"):
        agent_class("/nowhere/agent.py")

"""Generated tokens per second of episodes with a tool, against the same tokens without one; JSON on the last line.

python benchmarks/episodes.py --episodes 16 --turns 12 --new-tokens 32 [--output benchmarks/results/episodes.json]

Episodes run on the engine of a CPU's rollout worker, with a checkpoint of random weights: each turn is of exactly so many
tokens, is read as a call of the environment `tool` (text) or `crop` (images), and answered. What is compared, in turns:
- `episodes`: as they run in training, all at once.
- `in_one_turn`: one request for each, whose prompt has all that was shown in its episode, and as many generated tokens.
- `without_tools`: one request for each with the episode's first prompt alone, and as many generated tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name
from PIL import Image

from lmm_r1 import cpu
from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.agents.tool_environment import CropEnvironment, ToolEnvironment
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart

if TYPE_CHECKING:
    from lmm_r1.data.sample import Sample
    from lmm_r1.generation.vllm_engine import InProcessEngine

QUESTION = "What does the picture show? Think first, then answer."
KINDS = ("text", "images")
WAYS = ("episodes", "in_one_turn", "without_tools")
BEGIN, END = "<!-- episodes -->\n", "<!-- /episodes -->\n"
SENTENCE = "The {ordinal} shelf of row {row} holds a {colour} box with {count} cups, and stands {side} of the window. "
MARK = "<image>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a small one is made")
    parser.add_argument("--arch", default="qwen2_5_vl", help="of the model that is made")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the tool answers with")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12, help="of each episode")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each turn")
    parser.add_argument("--image-side", type=int, default=448, help="pixels of each side of the picture of a prompt")
    parser.add_argument("--crop-pixels", type=int, default=112 * 112, help="of a crop, as it is shown")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of which medians are taken, after one that is left out"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--no-prefix-caching", action="store_true", help="as with --agent.no_prefix_caching")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--page", type=Path, help="also write the table into this page, between its marks")
    arguments = parser.parse_args()
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.page:
        before, _, rest = arguments.page.read_text().partition(BEGIN)
        arguments.page.write_text(before + BEGIN + table_of(result) + END + rest.partition(END)[2])
    print(json.dumps(result))


def table_of(result: dict[str, Any]) -> str:
    """Return the figures as the docs show them."""
    lines = [
        "| a turn is answered with | generated tokens/s in episodes | in one turn each | without tools | episodes / in one turn "
        "| episodes / without tools |",
        "|---|---|---|---|---|---|",
    ]
    for kind, entry in result["kinds"].items():
        speeds = " | ".join(f"{entry[way]['tokens_per_second']:,.0f}" for way in WAYS)
        ratios = " | ".join(f"{100 * entry[f'episodes_over_{way}']:.0f} %" for way in WAYS[1:])
        lines.append(f"| {kind} | {speeds} | {ratios} |")
    return "\n".join(lines) + "\n"


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return medians of all ways, for each kind of answers."""
    model = arguments.model or make_model(folder / "model", arch=arguments.arch)
    engine, codec = start_engine(arguments, model)
    load = os.getloadavg()[0]
    kinds = {kind: asyncio.run(measure_kind(kind, arguments, engine, codec)) for kind in arguments.kinds}
    return {
        "kinds": kinds,
        "benchmark": "episodes",
        "machine": machine_name(),
        "load_before": round(load, 2),
        **{name: vars(arguments)[name] for name in ("dtype", "arch", "episodes", "turns", "new_tokens", "image_side")},
        "crop_pixels": arguments.crop_pixels,
        "prefix_caching": not arguments.no_prefix_caching,
        "repeats": arguments.repeats,
    }


def make_model(folder: Path, *, arch: str) -> Path:
    command = [sys.executable, "-m", "lmm_r1.cli.make_tiny_model", "--arch", arch]
    subprocess.run(
        [*command, "--hidden_size", "192", "--layers", "6", "--output", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return folder


def start_engine(arguments: argparse.Namespace, model: Path) -> tuple[InProcessEngine, Any]:
    """Start the engine as a run's rollout worker does where there is no CUDA."""
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    from lmm_r1.generation.codec import PromptCodec
    from lmm_r1.generation.engine_arguments import engine_arguments
    from lmm_r1.generation.vllm_engine import InProcessEngine
    from lmm_r1.lmm_kits import Checkpoint

    checkpoint = Checkpoint(str(model))
    settings = engine_arguments(
        str(model),
        kit=checkpoint.kit,
        config=checkpoint.config,
        trust_remote_code=False,
        dtype=arguments.dtype,
        max_model_len=16384,
        max_images=1 + arguments.turns if checkpoint.kit.takes_images else 0,
        max_videos=0,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
    )
    settings |= {
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "seed": 0,
    }
    engine = InProcessEngine(lambda: LLMEngine.from_engine_args(vllm.AsyncEngineArgs(**settings)), own_thread=True)
    codec = PromptCodec(
        kit=checkpoint.kit, processor=checkpoint.processor, banned_token_ids=checkpoint.banned_token_ids
    )
    return engine, codec


async def measure_kind(
    kind: str, arguments: argparse.Namespace, engine: InProcessEngine, codec: Any
) -> dict[str, Any]:
    """Return medians over the repeats, in each of which the three ways follow one another."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    context: dict[str, float] = {}
    generated = arguments.episodes * arguments.turns * arguments.new_tokens
    for repeat in range(arguments.repeats + 1):
        rows = make_rows(kind, arguments, seed=repeat)
        took, episodes = await timed(engine, codec, rows, arguments, environment=Calling(kind, arguments))
        taken = {"episodes": took}
        shown = [Calling(kind, arguments).shown_row(row) for row in rows]
        joined = [in_one_turn(sample, row) for sample, row in zip(episodes, shown, strict=True)]
        samples = {"episodes": episodes}
        for way, prompts in (("in_one_turn", joined), ("without_tools", shown)):
            taken[way], samples[way] = await timed(engine, codec, prompts, arguments, environment=None)
        for way in WAYS:
            made = sum(sample.generated_tokens for sample in samples[way])
            assert made == generated, f"{way}: {made} of {generated} tokens"
            context[way] = statistics.mean(len(sample.token_ids) for sample in samples[way])
            # The first one is warm-up.
            if repeat:
                seconds[way].append(taken[way])
    found: dict[str, Any] = {
        way: {
            "seconds": round(statistics.median(seconds[way]), 3),
            "tokens_per_second": round(generated / statistics.median(seconds[way]), 1),
            "context_tokens": round(context[way], 1),
        }
        for way in WAYS
    }
    for way in WAYS[1:]:
        ratios = [other / own for own, other in zip(seconds["episodes"], seconds[way], strict=True)]
        found[f"episodes_over_{way}"] = round(statistics.median(ratios), 4)
    return {**found, "generated_tokens": generated}


async def timed(
    engine: InProcessEngine,
    codec: Any,
    rows: Sequence[Row],
    arguments: argparse.Namespace,
    *,
    environment: Environment | None,
) -> tuple[float, list[Sample]]:
    """Return the seconds that all rows together take, and their samples; the engine knows nothing of them before."""
    from lmm_r1.config.ppo import AgentConfig
    from lmm_r1.data.sample import MediaRef
    from lmm_r1.generation.engine import SamplingSettings
    from lmm_r1.generation.episodes import EpisodeRollout
    from lmm_r1.generation.group import GroupRollout, GroupSettings
    from lmm_r1.generation.media_store import compact

    def store(media: Any) -> MediaRef:
        packed = compact(media)
        return MediaRef(key=str(id(packed)), stored=packed, nbytes=packed.nbytes)  # type: ignore[arg-type]

    await engine.reset_prefix_cache()
    await engine.reset_encoder_cache()
    await engine.reset_mm_cache()
    parts: dict[str, Any] = {"codec": codec, "scorer": Nothing(), "in_thread": engine.call, "store": store}
    rollout: GroupRollout
    tokens = arguments.new_tokens * (1 if environment else arguments.turns)
    if environment is None:
        rollout = GroupRollout(**parts)
    else:
        limits = AgentConfig(max_turns=arguments.turns, max_images=arguments.turns, overturn="keep")
        rollout = EpisodeRollout(environment=environment, limits=limits, **parts)
    settings = GroupSettings(
        sampling=SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=tokens),
        max_len=16384,
        logprobs=True,
        ignore_eos=True,
        overlong_prompts="error",
        media=True,
        pictures=environment is not None,
    )
    began = time.perf_counter()
    groups = await asyncio.gather(*(rollout.run(engine, row, settings, weight_version=0) for row in rows))
    return time.perf_counter() - began, [sample for group in groups for sample in group]


class Nothing:
    """Rewards nothing."""

    async def reward(self, **request: Any) -> Any:
        from remote_rm.verifier import Score

        return Score(reward=0.0, score=0.0, parts={})


class Calling(Environment):
    """An environment that takes every turn for a call: a model of random weights writes none."""

    name = "calling"

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        bounds = {"min_pixels": arguments.crop_pixels, "max_pixels": arguments.image_side**2}
        self.inner: Environment = CropEnvironment(**bounds) if kind == "images" else ToolEnvironment([look_up])
        self.stops, self.rewards, self.counts = self.inner.stops, self.inner.rewards, self.inner.counts  # type: ignore[misc]
        self.kind = kind

    def shown_row(self, row: Row) -> Row:
        return self.inner.shown_row(row)

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _CallingEpisode(self.inner.begin(row, seed=seed), self.kind, random.Random(seed))


class _CallingEpisode(Episode):
    def __init__(self, inner: Episode, kind: str, draw: random.Random) -> None:
        self.inner, self.kind, self.draw = inner, kind, draw

    async def answer(self, turn: Turn) -> Answered:
        answered = await self.inner.answer(replace(turn, text=f"{turn.text}{self._call()}"))
        assert answered.counts["malformed_calls"] == answered.counts["failed_calls"] == 0
        return answered

    def _call(self) -> str:
        if self.kind == "text":
            cell = {"row": self.draw.randint(1, 99), "shelf": self.draw.randint(1, 9)}
            return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': cell})}</tool_call>"
        left, upper = (round(self.draw.uniform(0, 0.7), 2) for _ in range(2))
        box = [left, upper, round(left + 0.25, 2), round(upper + 0.25, 2)]
        return f"<grounding>{json.dumps({'bbox_2d': box, 'source': 'original_image'})}</grounding>"


def look_up(row: int, shelf: int) -> str:
    """Say what stands on a shelf.

    Args:
        row: Which row.
        shelf: Which shelf.
    """
    draw = random.Random(row * 100 + shelf)
    return "".join(
        SENTENCE.format(
            ordinal=draw.choice(("first", "second", "third")),
            row=row,
            colour=draw.choice(("red", "green", "blue")),
            count=draw.randint(2, 40),
            side=draw.choice(("left", "right")),
        )
        for _ in range(2)
    )


def make_rows(kind: str, arguments: argparse.Namespace, *, seed: int) -> list[Row]:
    """Return one row per episode, with a picture of its own where answers are images: coloured noise in large squares."""
    noise = random.Random(seed)
    rows = []
    for number in range(arguments.episodes):
        parts: list[Part] = [TextPart(QUESTION)]
        if kind == "images":
            pixels = Image.frombytes("RGB", (8, 8), noise.randbytes(8 * 8 * 3))
            parts.insert(0, ImagePart(pixels.resize((arguments.image_side,) * 2, Image.Resampling.NEAREST)))
        asked = Message(role="user", parts=tuple(parts))
        location = f"repeat {seed}, row {number}"
        rows.append(Row(messages=(asked,), answer="7", datasource="noise", location=location))
    return rows


def in_one_turn(sample: Sample, shown: Row) -> Row:
    """Return a row whose prompt has all that an episode was shown, in as many messages; the policy's turns are empty.

    Args:
        shown: the episode's row, as the policy was shown it.
    """
    assert sample.played is not None
    messages = list(shown.messages)
    for said in sample.played.said:
        if said.role == "user":
            messages.append(Message(role="assistant", parts=(TextPart(""),)))
            messages.append(Message(role="user", parts=tuple(_parts(said.text, said.images))))
    return replace(shown, messages=tuple(messages))


def _parts(text: str, images: Sequence[ImagePart]) -> Iterator[Part]:
    """Yield a turn's texts, and its images in the place of their marks."""
    left = list(images)
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield left.pop(0)
        if piece:
            yield TextPart(piece)


if __name__ == "__main__":
    main()

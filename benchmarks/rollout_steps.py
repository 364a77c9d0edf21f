"""Engine steps of rollouts, with tokens that are guessed ahead and with more prompts under way than a step has; JSON last.

python benchmarks/rollout_steps.py [--rollouts 8] [--output benchmarks/results/rollout_steps.json]

A step of vLLM's engine is one forward pass of the model over whatever is under way. Both parts sample from the cold start
of `async_training.py` on the task `digits`, in text and images:
- `guesses`: responses one after the other, so that the steps are those of one response: forward passes a token.
- `oversampling`: rollouts of 32 prompts with 8 responses each. A response that does not end goes on to 200 tokens, where
  most take some 20: the long tail. Between rollouts the engine forgets what it has computed, as after an update, whose
  weights are the same here. Counted are steps and the engine's seconds of CPU time up to the rollout's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_training import PROMPTS, SAMPLES, prepare
from machine import machine_name

from lmm_r1 import cpu
from lmm_r1.config.shared import Speculation

if TYPE_CHECKING:
    from lmm_r1.data.messages import Row

MAX_LEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=48, help="one after the other")
    parser.add_argument("--guessed", type=int, nargs="+", default=[0, 2, 4, 8], help="tokens guessed ahead")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 1.25, 1.5, 2.0], help="of over-sampling")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="longest response")
    parser.add_argument("--cold_start_rows", type=int, default=9600, help="of the supervised start, once each")
    parser.add_argument("--folder", type=Path, help="keep rows and cold start here")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        prepare(folder, seed=1, rows=arguments.cold_start_rows, prompts=arguments.rollouts * PROMPTS)
        cpu.prepare_process()
        from lmm_r1.data.files import read_row_file

        rows = list(read_row_file(str(folder / "prompts")).rows.values())
        result = {
            "benchmark": "rollout_steps",
            "machine": machine_name(),
            "guesses": [
                one_by_one(
                    folder / "start",
                    rows[: arguments.responses],
                    guessed=guessed,
                    temperature=temperature,
                    longest=arguments.max_new_tokens,
                )
                for temperature in (0.0, 1.0)
                for guessed in arguments.guessed
            ],
            "oversampling": [
                rollouts(folder / "start", rows, factor=factor, longest=arguments.max_new_tokens)
                for factor in arguments.factors
            ],
        }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


class Steps:
    """Counts the steps of a vLLM engine, and the CPU seconds of the thread that makes them."""

    def __init__(self, llm_engine: Any) -> None:
        self.count, self.seconds = 0, 0.0
        self._step = llm_engine.step
        llm_engine.step = self._counted

    def _counted(self) -> Any:
        began = time.thread_time()
        try:
            return self._step()
        finally:
            self.count += 1
            self.seconds += time.thread_time() - began


def one_by_one(model: Path, rows: Sequence[Row], *, guessed: int, temperature: float, longest: int) -> dict[str, Any]:
    """Return the steps that a token takes where an engine has one response at a time, of `longest` tokens at most."""
    from lmm_r1.generation.engine import EngineSettings, SamplingSettings
    from lmm_r1.generation.vllm_engine import VllmEngine

    settings = EngineSettings(
        adapter=None,
        dtype="float32",
        max_model_len=MAX_LEN,
        max_images=1,
        max_videos=0,
        batch_rows=1,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        seed=1,
        trust_remote_code=False,
        speculation=Speculation(method="ngram", tokens=guessed) if guessed else None,
    )
    engine = VllmEngine(str(model), settings)
    steps = Steps(engine.engine.engine)
    sampling = SamplingSettings(n_samples=1, temperature=temperature, top_p=1.0, max_new_tokens=longest)
    tokens, texts = 0, []
    for number, row in enumerate(rows):
        for outcome in engine.respond([(number, row)], sampling):
            for completion in outcome.completions:
                assert completion.num_tokens is not None, "the engine counts them"
                tokens += completion.num_tokens
                texts.append(completion.text)
    engine.close()
    return {
        "temperature": temperature,
        "speculative_tokens": guessed,
        "tokens": tokens,
        "steps": steps.count,
        "steps_per_token": round(steps.count / tokens, 4),
        "cpu_seconds": round(steps.seconds, 2),
        "first_text": texts[0],
    }


def rollouts(model: Path, rows: Sequence[Row], *, factor: float, longest: int) -> dict[str, Any]:
    """Return what a rollout takes where `factor` times as many prompts are under way as a step has."""
    from lmm_r1.data.training_rows import PromptStream
    from lmm_r1.rl.groups import GroupsUnderWay, kept_tokens

    actor, steps, loop = start_actor(model)
    generator = generator_of(actor, loop, under_way=GroupsUnderWay(factor=factor, most_held=1), longest=longest)
    prompts = PromptStream(rows, seed=1, episodes=1)
    took: dict[str, list[float]] = {"steps": [], "cpu_seconds": [], "held_over_groups": [], "kept_tokens": []}
    lengths: list[list[int]] = []
    while generator.can_fill(prompts, count=PROMPTS):
        before, seconds = steps.count, steps.seconds
        made = generator.rollout(prompts, count=PROMPTS)
        samples = [sample for group in made.groups for sample in group]
        took["steps"].append(steps.count - before)
        took["cpu_seconds"].append(steps.seconds - seconds)
        took["held_over_groups"].append(made.held_over)
        took["kept_tokens"].append(kept_tokens(samples, updates=actor.weights.version))
        lengths.append([sample.generated_tokens for sample in samples])
        # As after an update.
        asyncio.run_coroutine_threadsafe(actor.reset_caches(keep_images=False), loop).result()
    actor.llm.engine.engine_core.shutdown()
    loop.call_soon_threadsafe(loop.stop)
    return {
        "oversample": factor,
        "rollouts": len(lengths),
        **{f"{name}_per_rollout": round(statistics.fmean(values), 2) for name, values in took.items()},
        "tokens_per_rollout": round(statistics.fmean(map(sum, lengths)), 1),
        "mean_length_by_rollout": [round(statistics.fmean(own), 2) for own in lengths],
        "longest": max(map(max, lengths)),
    }


def start_actor(model: Path) -> tuple[Any, Steps, asyncio.AbstractEventLoop]:
    """Start what is in a rollout worker, with an event loop of its own."""
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    from lmm_r1.data.sample import MediaRef
    from lmm_r1.generation.codec import PromptCodec
    from lmm_r1.generation.engine_actor import KitRolloutActor
    from lmm_r1.generation.engine_arguments import engine_arguments
    from lmm_r1.generation.group import GroupRollout
    from lmm_r1.generation.request import EngineWeights
    from lmm_r1.generation.vllm_engine import InProcessEngine
    from lmm_r1.lmm_kits import Checkpoint

    checkpoint = Checkpoint(str(model))
    settings = engine_arguments(
        str(model),
        kit=checkpoint.kit,
        config=checkpoint.config,
        trust_remote_code=False,
        dtype="float32",
        max_model_len=MAX_LEN,
        max_images=1,
        max_videos=0,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
    )
    settings |= {"distributed_executor_backend": "uni", "logprobs_mode": "processed_logprobs", "max_logprobs": 1}
    # All responses of a rollout are in each step, whatever is under way.
    settings |= {"seed": 1, "max_num_seqs": 2 * PROMPTS * SAMPLES}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    actor = object.__new__(KitRolloutActor)
    actor.llm = InProcessEngine(lambda: LLMEngine.from_engine_args(vllm.AsyncEngineArgs(**settings)), own_thread=True)
    actor.weights, actor.paused = EngineWeights(), False
    codec = PromptCodec.of(str(model), trust_remote_code=False)
    actor.groups = GroupRollout(
        codec=codec,
        scorer=None,
        in_thread=actor.llm.call,
        store=lambda media: MediaRef(key=str(id(media)), stored=None, nbytes=0),
        weights=actor.weights,
    )
    return actor, Steps(actor.llm.engine), loop


def generator_of(actor: Any, loop: asyncio.AbstractEventLoop, *, under_way: Any, longest: int) -> Any:
    """Return what makes a run's rollouts, on an actor of this process."""
    from lmm_r1 import dotted
    from lmm_r1.config import PPOConfig
    from lmm_r1.generation.engine import SamplingSettings
    from lmm_r1.generation.group import GroupSettings
    from lmm_r1.rl.generator import KitSamplesGenerator
    from lmm_r1.rl.groups import StartedGroup

    class Here(KitSamplesGenerator):
        def _begun(self, row: Row, settings: GroupSettings, *, place: int) -> StartedGroup:
            ref = asyncio.run_coroutine_threadsafe(actor.generate_group(row, settings), loop)
            return StartedGroup(row=row, place=place, engine=0, ref=ref)

        def _await_some(self, groups: Sequence[StartedGroup]) -> None:
            wait([group.ref for group in groups], return_when=FIRST_COMPLETED)
            for group in groups:
                if group.ref.done():
                    group.samples = group.ref.result().samples

        def generate(self, rows: Sequence[Row], settings: GroupSettings, **others: Any) -> Any:
            begun = [self._begun(row, settings, place=0) for row in rows]
            return [group.ref.result().samples for group in begun]

        def _go_on(self) -> None:
            if self._held_up:
                asyncio.run_coroutine_threadsafe(actor.resume_generation(), loop).result()
                self._held_up = False

        def _hold_up(self) -> None:
            if self.under_way.unfinished:
                asyncio.run_coroutine_threadsafe(actor.pause_generation(), loop).result()
                self._held_up = True

    config = dotted.replace(PPOConfig(), {"logger.rollouts_per_step": 0, "reward.deadline_s": 3600.0})
    sampling = SamplingSettings(n_samples=SAMPLES, temperature=1.0, top_p=1.0, max_new_tokens=longest)
    settings = GroupSettings(
        sampling=sampling, max_len=MAX_LEN, logprobs=True, ignore_eos=False, overlong_prompts="error", media=True
    )
    return Here(config, [], settings, under_way=under_way)


if __name__ == "__main__":
    main()

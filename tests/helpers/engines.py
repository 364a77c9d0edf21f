"""vLLM in the test's own process, on a checkpoint and with the arguments that its kit gives."""

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.passes import next_log_probs
from helpers.processes import keep_frozen

from lmm_r1 import cpu
from lmm_r1.config.shared import Speculation
from lmm_r1.generation.engine_arguments import speculative_arguments
from lmm_r1.generation.worker_extension import FileWeights
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, LmmKit
from lmm_r1.models.actor import KitActor

MAX_MODEL_LEN = 4096
CACHE_BYTES = 128 * 2**20


@dataclass(kw_only=True)
class EngineRun:
    """A policy, and an engine with its weights."""

    folder: Path
    """For new weights."""
    policy: KitActor
    banned: list[int]
    prompts: list[EncodedPrompt]
    engine: Any


@contextmanager
def running_engine(
    kit: LmmKit,
    folder: Path,
    *,
    max_images: int,
    max_videos: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    dtype: str = "float32",
    speculation: Speculation | None = None,
    **more: Any,
) -> Iterator[Any]:
    """Yield a `vllm.LLM` that bans tokens and takes new weights as the engines of a training run do.

    Requests reach it as they reach an engine in another process: through vLLM's msgpack.

    Args:
        more: further arguments of the engine.
    """
    cpu.prepare_process()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    _keep_libraries_frozen()
    config = kit.load_config(str(folder), trust_remote_code=False)
    # Before the argument, and in GiB; no engine gives its cache back, and one process has dozens of them.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        llm = LLM(
            str(folder),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=128,
            kv_cache_memory_bytes=CACHE_BYTES,
            seed=0,
            logprobs_mode="raw_logprobs",
            worker_extension_cls=f"{FileWeights.__module__}.{FileWeights.__qualname__}",
            disable_log_stats=speculation is None,
            **speculative_arguments(speculation),
            **kit.engine_arguments(config, max_images=max_images, max_videos=max_videos),
            **more,
        )
    llm.collective_rpc("ban_tokens", args=(Checkpoint(str(folder)).banned_token_ids,))
    core, encoder, decoder = llm.llm_engine.engine_core, MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    add = core.add_request
    core.add_request = lambda request: add(decoder.decode([bytes(part) for part in encoder.encode(request)]))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


@cache
def _keep_libraries_frozen() -> None:
    """Once in a process, and with vLLM loaded."""
    keep_frozen()


def sampled(
    llm: Any,
    kit: LmmKit,
    prompts: Sequence[EncodedPrompt],
    *,
    banned: Sequence[int],
    n: int,
    max_tokens: int,
    temperature: float = 1.0,
    **sampling: Any,
) -> list[list[tuple[list[int], list[float]]]]:
    """Return for each prompt its n samples: token ids, and the log-probs that the engine reports for them.

    Args:
        temperature: of the policy, at which it is sampled from unless `sampling` says otherwise.
        sampling: further settings of `SamplingSettings`; `min_p` is one that only an agent may ask for.
    """
    from vllm.inputs import TokensPrompt

    from lmm_r1.generation.engine import SamplingSettings
    from lmm_r1.generation.request import sampling_params

    requests = []
    for prompt in prompts:
        request = TokensPrompt(prompt_token_ids=prompt.engine_token_ids)
        media = kit.engine_media(prompt)
        if media:
            request["multi_modal_data"] = media
        requests.append(request)
    min_p = sampling.pop("min_p", 0.0)
    given: dict[str, Any] = {"temperature": temperature, "top_p": 1.0} | sampling
    # A rollout's own parameters, but that every sample is as long as it may be.
    parameters = sampling_params(
        SamplingSettings(n_samples=n, max_new_tokens=max_tokens, **given),
        max_tokens=max_tokens,
        end_token_id=0,
        logprobs=True,
        ignore_eos=True,
        output_per="prompt",
    )
    parameters.min_p = min_p
    llm.collective_rpc("ban_tokens", args=(list(banned), temperature or 1.0))
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.prompt_token_ids) == prompt.token_ids, "the engine expands the placeholders differently"
    return [
        [
            (
                list(sample.token_ids),
                [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)],
            )
            for sample in output.outputs
        ]
        for output in outputs
    ]


def loaded_one_by_one(llm: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of a new model of the engine's that got these weights as a run on GPUs sends them.

    Not those of the engine's own model, which its CPU backend has packed.
    """

    def load(worker: Any) -> dict[str, torch.Tensor]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model

        config = copy.copy(worker.vllm_config)
        # Layers note their names there, and no name may come twice.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_current_vllm_config(config):
            model = initialize_model(config)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        for name, weight in weights.items():
            model.load_weights(weights=[(name, weight)])
        return dict(model.named_parameters())

    (found,) = llm.collective_rpc(load)
    return found


def load_weights(llm: Any, actor: KitActor, folder: Path) -> None:
    """Give the engine the actor's weights as a training run does, and let it forget what it computed with the old ones."""
    actor.model.save_pretrained(folder)
    llm.collective_rpc("load_weights_from", args=(str(folder),))
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()
    llm.llm_engine.reset_mm_cache()


def largest_difference(
    actor: KitActor, prompts: Sequence[EncodedPrompt], samples: Sequence[Sequence[tuple[list[int], list[float]]]]
) -> float:
    """Return the largest distance between the engine's log-probs and those of the training forward."""
    differences = [0.0]
    for prompt, group in zip(prompts, samples, strict=True):
        for token_ids, reported in group:
            sequence = torch.tensor([[*prompt.token_ids, *token_ids]])
            with torch.no_grad():
                log_probs = next_log_probs(
                    actor, sequence, attention_mask=torch.ones_like(sequence), media=[prompt.media]
                )[0, -len(token_ids) :]
            differences.append((log_probs - torch.tensor(reported)).abs().max().item())
    return max(differences)


def disturb(actor: KitActor, *, seed: int) -> None:
    """Move every weight a little, as an optimizer step does; also those that a fresh model starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in actor.model.parameters():
            scale = 0.1 * weight.std() if weight.numel() > 1 and weight.std() > 0 else 0.02
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)

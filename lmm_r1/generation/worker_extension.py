"""Our parts of vLLM's processes: the worker takes weights and bans tokens, the scheduler sends all pictures.

The worker (`worker_extension_cls`) may be another process than the caller. A contract test sends the arguments of each
public method through vLLM's msgpack encoder (tests/contracts/test_worker_calls.py). The scheduler sends all pictures,
because vLLM 0.29 drops those of a request whose keys and values are in the prefix cache. If the caches are emptied for
new weights, or make room for others, the worker computes these pictures again and needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import vllm.v1.worker.gpu.sample.sampler as gpu_sampler
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as gpu_rejection_sampler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.sampler import Sampler

from lmm_r1.generation.weight_bucket import WeightSlot, empty_buffer, opened, weights_in
from lmm_r1.host.openrlhf import WorkerWrap, get_physical_gpu_id


class PictureScheduler(Scheduler):
    """vLLM's scheduler that plans a step after the previous one has ended."""

    def schedule(self, *arguments: Any, **settings: Any) -> SchedulerOutput:
        return _with_pictures(super().schedule(*arguments, **settings), self.requests)


class AsyncPictureScheduler(AsyncScheduler):
    """vLLM's scheduler that plans steps ahead."""

    def schedule(self, *arguments: Any, **settings: Any) -> SchedulerOutput:
        return _with_pictures(super().schedule(*arguments, **settings), self.requests)


def picture_scheduler(*, vllm_config: Any, **settings: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with all pictures."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (AsyncPictureScheduler if ahead else PictureScheduler)(vllm_config=vllm_config, **settings)


def _with_pictures(planned: SchedulerOutput, requests: Any) -> SchedulerOutput:
    for begun in planned.scheduled_new_reqs:
        begun.mm_features = requests[begun.req_id].mm_features
    return planned


def _divided(scores: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    """Return a function of logits for logits that are divided by the temperature."""

    @wraps(scores)
    def divided(logits: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        return scores(logits.float() / temperature, *arguments, **settings)

    return scores if temperature == 1 else divided


class TokenBan:
    """Keeps tokens from being sampled in any request, and reports the policy's log-probs."""

    # Of vLLM's worker.
    model_runner: Any
    device: torch.device

    def ban_tokens(self, token_ids: Sequence[int], temperature: float = 1.0) -> None:
        """Give these tokens no probability from now on; each call replaces the previous ones.

        The `logit_bias` of requests is no alternative: vLLM takes at most 1,024 entries on GPUs, and none with speculative
        decoding. A request's own bias, which is added later, cannot lift a ban.

        Args:
            temperature: the trainer's, at which log-probs are reported with vLLM's `raw_logprobs`. Whatever else a request
                samples by, such as `top_p`, is not in them.
        """
        model = self.model_runner.get_model()
        # Restore the class's own method if tokens were banned before.
        vars(model).pop("compute_logits", None)
        compute = model.compute_logits
        banned = torch.tensor(list(token_ids), dtype=torch.long, device=self.device)

        @wraps(compute)
        def without_banned(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            # None on ranks that sample nothing.
            return None if logits is None else logits.index_fill_(-1, banned, -torch.inf)  # (N, V)

        model.compute_logits = without_banned
        self._report_at(temperature)

    def _report_at(self, temperature: float) -> None:
        # None on ranks that sample nothing.
        sampler = getattr(self.model_runner, "sampler", None)
        if isinstance(sampler, Sampler):
            sampler.compute_logprobs = _divided(Sampler.compute_logprobs, temperature)
            return
        # The GPU's second model runner: its samplers call a function by its name in their modules.
        for module in (gpu_sampler, gpu_rejection_sampler):
            found = module.compute_topk_scores
            module.compute_topk_scores = _divided(getattr(found, "__wrapped__", found), temperature)


class BucketWeights(TokenBan, WorkerWrap):
    """Takes buckets of weights from the trainer's GPUs, through the group that OpenRLHF's `init_process_group` makes."""

    # Of vLLM's worker.
    model_config: Any

    def receive_bucket(self, sent: Sequence[Sequence[Any]]) -> None:
        """Replace the weights of these slots by those that the trainer's rank 0 broadcasts."""
        slots = [WeightSlot(*fields) for fields in sent]
        buffer = empty_buffer(slots, device=self.device)
        if self._model_update_with_ray:
            from ray.util import collective

            collective.broadcast(buffer, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())
        self._load(buffer, slots)

    def open_bucket(self, sent: Sequence[Sequence[Any]], handles: Mapping[str, bytes]) -> None:
        """Replace the weights of these slots by those in a buffer of the trainer's process on this GPU.

        Args:
            handles: of the buffer of each GPU, by the GPU's identity.
        """
        buffer = opened(handles[get_physical_gpu_id()], device=self.device)
        self._load(buffer, [WeightSlot(*fields) for fields in sent])
        torch.cuda.synchronize()

    def _load(self, buffer: torch.Tensor, slots: Sequence[WeightSlot]) -> None:
        wrong = {slot.name: slot.dtype for slot in slots if slot.dtype != self.model_config.dtype}
        assert not wrong, f"the engine computes in {self.model_config.dtype}, and gets {wrong}"
        self.model_runner.model.load_weights(weights=weights_in(buffer, slots))


class FileWeights(TokenBan):
    """Loads new weights from a folder of safetensors."""

    # Of vLLM's worker.
    reload_weights: Callable[..., None]

    def load_weights_from(self, folder: str) -> None:
        """Replace all weights by those in `folder`, which holds only weights.

        Features of images stay, as with buckets, because the scheduler counts on them.
        """
        config = self.model_runner.model_config
        original, features = (config.model, config.revision), dict(self._image_features())
        try:
            self.reload_weights(weights_path=folder)
        finally:
            # vLLM notes the folder as the model's name, from which the processor would then be loaded.
            config.model, config.revision = original
        self._image_features().update(features)
        self._refresh_tied_heads()
        self._refresh_experts()

    def _image_features(self) -> dict[str, torch.Tensor]:
        """Return the worker's image features by hash; vLLM's two model runners keep them in different places."""
        cache = self.model_runner.encoder_cache
        if cache is None:
            return {}
        return cache if isinstance(cache, dict) else cache.encoder_outputs

    def _refresh_tied_heads(self) -> None:
        """Pack the output layers again: the folder has no weights for a tied one, which would keep its old copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def _refresh_experts(self) -> None:
        """Pack the experts' weights for the CPU kernel again: vLLM does that only after its first load."""
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        for module in self.model_runner.model.modules():
            method = module.quant_method if isinstance(module, RoutedExperts) else None
            if (
                isinstance(method, UnquantizedFusedMoEMethod)
                and method.unquantized_backend == UnquantizedMoeBackend.CPU
            ):
                method.moe_kernel.fused_experts.process_weights_after_loading(module)

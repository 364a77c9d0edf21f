"""What vLLM's worker can do beside its own methods (`worker_extension_cls` of the engine): take weights, ban tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from lmm_r1 import cpu
from lmm_r1.generation.weight_bucket import WeightSlot, empty_buffer, weights_in
from lmm_r1.lmm_kits.checkpoint import BAN_BIAS


class TokenBan:
    """Keeps tokens from being sampled, whatever request asks: for engines that guess tokens."""

    # Of vLLM's worker.
    model_runner: Any
    device: torch.device

    def ban_tokens(self, token_ids: Sequence[int]) -> None:
        """Add the bias of banned tokens to all logits from now on; once for an engine.

        An engine that guesses tokens refuses requests with a `logit_bias`, which it would not add where it checks guesses.
        """
        if not cpu.own_cuda():
            cpu.mend_guesses()
        model = self.model_runner.get_model()
        compute = model.compute_logits
        banned = torch.tensor(list(token_ids), dtype=torch.long, device=self.device)

        @wraps(compute)
        def biased(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            # None on ranks that sample nothing.
            if logits is not None:
                logits[:, banned] += BAN_BIAS  # (N, V)
            return logits

        model.compute_logits = biased


class BucketWeights(TokenBan, WorkerWrap):
    """Takes buckets of weights from the trainer's GPUs, through the group that OpenRLHF's `init_process_group` makes."""

    # Of vLLM's worker.
    model_config: Any

    def receive_bucket(self, slots: Sequence[WeightSlot]) -> None:
        """Replace the weights of these slots by those that the trainer's rank 0 broadcasts."""
        buffer = empty_buffer(slots, device=self.device)
        if self._model_update_with_ray:
            from ray.util import collective

            collective.broadcast(buffer, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())
        self._load(buffer, slots)

    def open_bucket(
        self, slots: Sequence[WeightSlot], handles: Mapping[str, tuple[Callable[..., Any], tuple]]
    ) -> None:
        """Replace the weights of these slots by those in a buffer of the trainer's process on this GPU.

        Args:
            handles: what `reduce_tensor` makes of the buffer of each GPU, by the GPU's identity.
        """
        rebuild, arguments = handles[get_physical_gpu_id()]
        given = list(arguments)
        # The device's number is another one where the processes see other devices.
        given[6] = self.device.index
        self._load(rebuild(*given), slots)
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
        """Replace all weights by those in `folder`, which holds weights only.

        Features of images stay, as they do where buckets are loaded: the scheduler, which counts on them, is not told here.
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

    def take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of these names by tensors of this process, on its own GPU."""
        self.model_runner.model.load_weights(weights=list(weights.items()))

    def _image_features(self) -> dict[str, torch.Tensor]:
        """Return what the worker keeps of images, by their hashes; vLLM's two model runners have it in two places."""
        cache = self.model_runner.encoder_cache
        if cache is None:
            return {}
        return cache if isinstance(cache, dict) else cache.encoder_outputs

    def _refresh_tied_heads(self) -> None:
        """Pack the output layers again: a tied one has no weights of its own in the folder and keeps its old copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def _refresh_experts(self) -> None:
        """Pack the experts' weights for the CPU kernel again: vLLM does that after its first load alone."""
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

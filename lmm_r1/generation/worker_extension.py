"""What vLLM's worker can do beside its own methods on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FileWeights:
    """Loads new weights from a folder of safetensors (`worker_extension_cls` of the engine)."""

    # Of vLLM's worker.
    model_runner: Any
    reload_weights: Callable[..., None]

    def load_weights_from(self, folder: str) -> None:
        """Replace all weights by those in `folder`, which holds weights only."""
        config = self.model_runner.model_config
        original = (config.model, config.revision)
        try:
            self.reload_weights(weights_path=folder)
        finally:
            # vLLM notes the folder as the model's name, from which the processor would then be loaded.
            config.model, config.revision = original
        self._refresh_tied_heads()
        self._refresh_experts()

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

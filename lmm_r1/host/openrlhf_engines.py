"""Names of OpenRLHF's rollout engines, which load Ray and vLLM but not DeepSpeed: vLLM's own processes import them."""

from openrlhf.trainer.ray.utils import get_physical_gpu_id as get_physical_gpu_id  # which GPU a weight bucket is on
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as RolloutRayActor  # base class of the engine's actor
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call as batch_vllm_engine_call  # a call of all engines
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as WorkerWrap  # base class of vLLM's worker extension

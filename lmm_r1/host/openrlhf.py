"""Names of OpenRLHF that do not load DeepSpeed: samples, agents, and rollout engines, which vLLM's own processes import."""

from __future__ import annotations

from openrlhf.trainer.ray.utils import get_physical_gpu_id as get_physical_gpu_id  # which GPU a weight bucket is on
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as RolloutRayActor  # base class of the engine's actor
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as WorkerWrap  # base class of vLLM's worker extension
from openrlhf.utils.agent import AgentExecutorBase as AgentExecutorBase  # base class of users' agents
from openrlhf.utils.agent import MultiTurnAgentExecutor as MultiTurnAgentExecutor  # base class of users' agents
from openrlhf.utils.distributed_util import stateless_init_process_group as stateless_init_process_group
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync as torch_dist_barrier_and_cuda_sync

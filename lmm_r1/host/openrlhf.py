"""Names of OpenRLHF that load neither Ray, DeepSpeed nor vLLM."""

from openrlhf.trainer.ppo_utils import NaiveReplayBuffer as NaiveReplayBuffer  # base class of the planned passes
from openrlhf.trainer.ppo_utils.experience import Experience as Experience  # the samples that its workers take
from openrlhf.utils.agent import AgentExecutorBase as AgentExecutorBase  # base class of users' agents
from openrlhf.utils.agent import MultiTurnAgentExecutor as MultiTurnAgentExecutor  # base class of users' agents
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync as torch_dist_barrier_and_cuda_sync
from openrlhf.utils.loss_utils import get_loss_batch_info as get_loss_batch_info  # what a pass's loss is divided by

"""Names of OpenRLHF's trainer and of its workers that hold models; they load Ray, DeepSpeed and vLLM."""

from openrlhf.trainer.ray.launcher import RayActorGroup as RayActorGroup  # calls the workers of a model
from openrlhf.trainer.ray.launcher import ReferenceModelActor as ReferenceModelActor
from openrlhf.trainer.ray.launcher import RewardModelActor as RewardModelActor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer as ActorPPOTrainer  # the policy's update
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor as PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor as CriticModelActor
from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer as CriticPPOTrainer  # the critic's update

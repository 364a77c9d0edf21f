"""Agents in OpenRLHF's form, which users' files are derived from."""

from helpers.upstream_names.seam import Seam

_EXECUTE = "self prompt label sampling_params max_length hf_tokenizer llm_engine images"

SEAMS: tuple[Seam, ...] = (
    Seam(
        upstream="openrlhf.utils.agent:AgentExecutorBase",
        how="used",
        ours="lmm_r1.agents.openrlhf_agent:agent_class",
        reason="what the class of a file is derived from",
        signature="self args kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.agent:AgentExecutorBase.execute",
        how="used",
        ours="lmm_r1.generation.executors:ExecutorRollout",
        reason="it is given the same by its names",
        signature=_EXECUTE,
    ),
    Seam(
        upstream="openrlhf.utils.agent:MultiTurnAgentExecutor",
        how="used",
        ours="lmm_r1.agents.openrlhf_agent:load_agent",
        reason="its class of agents is what plays episodes as an environment",
        signature="self agent_instance_cls",
    ),
    Seam(
        upstream="openrlhf.utils.agent:MultiTurnAgentExecutor.execute",
        how="used",
        ours="lmm_r1.agents.openrlhf_agent:load_agent",
        reason="a file that leaves it as it is leaves its turns to the engine",
        signature=_EXECUTE,
    ),
    Seam(
        upstream="openrlhf.utils.agent:AgentInstanceBase.reset",
        how="used",
        ours="lmm_r1.agents.openrlhf_agent:StepAgent",
        reason="called with one dict, as upstream calls it",
        signature="self states kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.agent:AgentInstanceBase.step",
        how="used",
        ours="lmm_r1.agents.openrlhf_agent:StepAgent",
        reason="as above",
        signature="self state_dict kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.generate",
        how="used",
        ours="lmm_r1.generation.executors:CalledEngine.generate",
        reason="what executors call of the engine that they are given",
        signature="self prompt_token_ids sampling_params multi_modal_data",
    ),
)

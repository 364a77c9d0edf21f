"""The wire format, OpenRLHF's own: what a trainer posts to /get_reward and what it reads from the reply."""

from pydantic import BaseModel, model_validator
from typing_extensions import Self


class RewardRequest(BaseModel):
    """Four parallel lists, one entry per sample."""

    query: list[str]
    """Prompt and response as decoded by the trainer, special tokens included."""
    prompts: list[str]
    """The prompt as rendered by the chat template."""
    labels: list[str]
    """The gold answer of each sample; an empty one is refused."""
    responses: list[str] | None = None
    """The response alone. OpenRLHF does not send it; without it the response is looked up inside `query`."""

    @model_validator(mode="after")
    def _lists_are_parallel(self) -> Self:
        lengths = {"query": len(self.query), "prompts": len(self.prompts), "labels": len(self.labels)}
        if self.responses is not None:
            lengths["responses"] = len(self.responses)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"the lists of one request must be equally long, but {listed}")
        return self


class RewardReply(BaseModel):
    """One entry per sample, in the order of the request."""

    rewards: list[float]
    """What the policy is trained on: the weighted sum of the parts."""
    scores: list[float]
    """Right (1.0) or wrong (0.0): what OpenRLHF's dynamic sampling filters by."""
    extra_logs: dict[str, list[float]]
    """The named parts of the rewards, for the trainer's log."""

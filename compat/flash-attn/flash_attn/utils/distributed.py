"""The differentiable all-gather that OpenRLHF takes from flash-attn."""

import torch
import torch.distributed as dist


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Every rank holds a part of the gradient of every shard: sum them, keep the own shard.
        # all_reduce instead of reduce_scatter, because gloo lacks the latter for tensors.
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        shards = grad.chunk(dist.get_world_size(ctx.group))
        return shards[dist.get_rank(ctx.group)], None


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the shards (N, ...) of all ranks of `group` joined along the first dimension; differentiable."""
    return _AllGather.apply(tensor, group)

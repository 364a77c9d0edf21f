"""A model's weights with the names and shapes of its checkpoint, which vLLM loads.

Transformers 5 renames weights, and stores the experts of a layer as one tensor (`conversion_mapping`). Saving a model
reverts that for all weights at once; this module reverts it for small groups of weights."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from bitsandbytes.nn import Params4bit
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from lmm_r1.config import PPOConfig
from lmm_r1.files.atomic import writing
from lmm_r1.generation.weight_bucket import BUCKET_BYTES, WeightSlot, empty_buffer, handle_of, slots_of, weights_in
from lmm_r1.host.models import GatheredParameters, whole_state_dict, whole_weights
from lmm_r1.host.openrlhf import get_physical_gpu_id, stateless_init_process_group, torch_dist_barrier_and_cuda_sync
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import FrozenLinear4bit, adapted_layers, merged_layer, merged_state_dict, quantized_layers


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights of a model that can be converted to tensors of its checkpoint without others."""

    names: tuple[str, ...]
    """Names of the parameters in the model."""
    stored_name: str | None
    """Name of the identical checkpoint tensor; None if tensors are split, merged or transposed."""


def stored_weights(model: PreTrainedModel, names: Iterable[str]) -> list[StoredWeights]:
    """Return a model's parameters in groups that make up tensors of the checkpoint.

    Args:
        names: the names of all parameters.
    """
    renamings, converters = _reversed(model)
    groups: dict[str, list[str]] = {}
    same: dict[str, bool] = {}
    for name in names:
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        groups.setdefault(stored, []).append(name)
        same[stored] = pattern is None
    return [
        StoredWeights(names=tuple(names), stored_name=stored if same[stored] else None)
        for stored, names in groups.items()
    ]


def as_stored(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors for the weights of one group, which are whole and have the model's names."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(weights)).items()}


def _reversed(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return the changes that `revert_weight_conversion` makes to a name, in order."""
    # Those used when the model was loaded; a model that was not loaded uses all of them.
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        used = [one for one in known if not isinstance(one, PrefixChange)]
    back = [one.reverse_transform() for one in reversed(used)]
    renamings = [one for one in back if isinstance(one, WeightRenaming)]
    return renamings, [one for one in back if isinstance(one, WeightConverter)]


Weights = dict[str, torch.nn.Parameter]
MEMORY = Path("/dev/shm")
# Size of the configuration and the headers, which are written with the weights.
_OTHER_FILES_BYTES = 2**20


def send_files(policy: KitActor, engines: Sequence[Any]) -> None:
    """Load all weights into the engines from a folder; every rank must call it."""
    with written_weights(policy) as folder:
        if dist.get_rank() == 0:
            ray.get([rollout.load_weights_from.remote(folder) for rollout in engines])


@contextmanager
def written_weights(policy: KitActor) -> Iterator[str]:
    """Write all weights into a folder, which is deleted after every rank has left; every rank must call it."""
    engine = policy.model
    weights = whole_state_dict(engine)
    folder = ""
    try:
        if dist.get_rank() == 0:
            merged = merged_state_dict(engine.module, weights)
            folder = _folder_for(sum(weight.nbytes for weight in merged.values()))
            with writing(folder):
                engine.module.save_pretrained(folder, state_dict=merged)
        named = [folder]
        dist.broadcast_object_list(named)
        yield named[0]
        dist.barrier()
    finally:
        if folder:
            shutil.rmtree(folder)


def _folder_for(nbytes: int) -> str:
    """Return a new folder in memory, or a temporary folder on disk if memory has no room for `nbytes`."""
    # A container has 64 MiB by default.
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > nbytes + _OTHER_FILES_BYTES
    return tempfile.mkdtemp(prefix="lmm-r1-weights-", dir=MEMORY if has_room else None)


class Channel(Protocol):
    """Sends buckets of weights from the trainer's ranks to the engines."""

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load these weights, whole and with the checkpoint's names, into all engines; every rank must call it."""


@dataclass(frozen=True)
class BroadcastChannel:
    """From rank 0 to engines on other GPUs, over NCCL."""

    engines: Sequence[Any]
    broadcast: Callable[[torch.Tensor], None] | None
    """Sends a tensor of rank 0 to every worker of all engines; None on other ranks."""

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.broadcast is None:
            return
        buffer, slots = _filled(weights)
        refs = [engine.receive_bucket.remote(slots) for engine in self.engines]
        self.broadcast(buffer)
        ray.get(refs)


def join_engines(engines: Sequence[Any], config: PPOConfig) -> Callable[[torch.Tensor], None]:
    """Create a group of this process and all engine workers; return a function that broadcasts a tensor to the workers."""
    per_engine, through_ray, name = config.vllm.tensor_parallel_size, config.vllm.sync_with_ray, "openrlhf"
    address, size = ray.util.get_node_ip_address(), len(engines) * per_engine + 1
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    refs = [
        engine.init_process_group.remote(
            address, port, number * per_engine + 1, size, name, backend="nccl", use_ray=through_ray
        )
        for number, engine in enumerate(engines)
    ]
    if through_ray:
        from ray.util import collective

        collective.init_collective_group(world_size=size, rank=0, backend="nccl", group_name=name)
        ray.get(refs)
        return lambda buffer: collective.broadcast(buffer, 0, group_name=name)
    group = stateless_init_process_group(address, port, 0, size, torch.cuda.current_device())
    ray.get(refs)
    return lambda buffer: group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())


@dataclass(frozen=True)
class SharedMemoryChannel:
    """From every rank to the engine workers on its own GPU, which read the buffer where it is (CUDA IPC)."""

    engines: Sequence[Any]

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        buffer, slots = _filled(weights)
        handles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, (get_physical_gpu_id(), handle_of(buffer)))
        if dist.get_rank() == 0:
            ray.get([engine.open_bucket.remote(slots, dict(handles)) for engine in self.engines])
        # No rank may free its buffer before all engines have read it.
        torch_dist_barrier_and_cuda_sync()


def send_buckets(policy: KitActor, channel: Channel, *, split: bool) -> None:
    """Send all weights changed by training, a bucket at a time; every rank must call it.

    For a model with adapters these are the merged weights of the adapted layers, and its 4-bit weights, which differ from
    the checkpoint. A frozen vision tower is not sent.

    Args:
        split: whether ranks hold parts of the weights by tensor parallelism.
    """
    torch.cuda.empty_cache()
    model = policy.model.module
    layers: dict[str, LoraLayer | FrozenLinear4bit] = {
        f"{name.removesuffix('.base_layer')}.weight": layer for name, layer in quantized_layers(model).items()
    }
    layers |= {f"{name}.weight": layer for name, layer in adapted_layers(model).items()}
    weights: Weights = {
        name.replace(".base_layer.", "."): weight for name, weight in model.named_parameters() if ".lora_" not in name
    }
    trained = {name for name, weight in weights.items() if weight.requires_grad or not policy.is_vlm}
    changed = layers.keys() if layers else trained
    groups = [group for group in stored_weights(model, weights) if not changed.isdisjoint(group.names)]
    for bucket in buckets(groups, weights, limit=BUCKET_BYTES):
        names = [name for group in bucket for name in group.names]
        merged = {name: _merged(layers[name]) for name in names if name in layers}
        with whole_weights([weights[name] for name in names if name not in layers], model=model, split=split):
            sent: dict[str, torch.Tensor] = {}
            for group in bucket:
                whole = {name: merged[name] if name in merged else weights[name].data for name in group.names}
                sent |= (
                    as_stored(model, whole)
                    if group.stored_name is None
                    else {group.stored_name: whole[group.names[0]]}
                )
            channel.send(sent)
    torch.cuda.empty_cache()
    torch_dist_barrier_and_cuda_sync()


def buckets(groups: Sequence[StoredWeights], weights: Weights, *, limit: int) -> list[list[StoredWeights]]:
    """Return groups in order, in buckets of at most `limit` bytes; a larger group has its own bucket."""
    found: list[list[StoredWeights]] = []
    room = 0
    for group in groups:
        size = sum(_bytes_of(weights[name]) for name in group.names)
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(group)
        room -= size
    return found


def _bytes_of(weight: torch.nn.Parameter) -> int:
    """Return the bytes of a whole weight; ZeRO-3 holds only a part of it here, and QLoRA four bits per number."""
    if isinstance(weight, Params4bit):
        return weight.quant_state.shape.numel() * weight.quant_state.dtype.itemsize
    count = weight.ds_numel if hasattr(weight, "ds_numel") else weight.numel()
    return count * weight.element_size()


def _filled(weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[WeightSlot]]:
    """Return a buffer that holds the weights, and their slots."""
    slots = slots_of(weights)
    buffer = empty_buffer(slots, device=next(iter(weights.values())).device)
    for name, place in weights_in(buffer, slots):
        place.copy_(weights[name])
    return buffer, slots


def _merged(layer: LoraLayer | FrozenLinear4bit) -> torch.Tensor:
    """Return the whole weight of a layer with an adapter or in 4 bits, on every rank."""
    if isinstance(layer, FrozenLinear4bit):
        return layer.dequantized()
    # Without ZeRO-3 the weights are whole, and this does nothing.
    with GatheredParameters(list(layer.parameters())):
        return merged_layer(layer)

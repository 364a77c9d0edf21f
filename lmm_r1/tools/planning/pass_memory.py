"""What a model and its passes hold, run on tensors without memory, and what DeepSpeed keeps of a trained model by ZeRO stage."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_leaves

from lmm_r1.data.sample import SampleMedia
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor, KitValueModel
from lmm_r1.models.adapters import adapted_layers, language_layers, layer_weights, packed_bytes
from lmm_r1.models.loading import LoadSettings
from lmm_r1.models.output_layer import two_slices
from lmm_r1.models.packed.packing import ModelSample

_INDEXED = torch.ops.aten.index.Tensor
_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default


class Unpredictable(Exception):
    """What is to be computed cannot be run on tensors without memory: it depends on their values, for instance."""


class LiveMemory(TorchDispatchMode):
    """While it is entered, counts the bytes of the tensors made within, and the most that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        # Storages by their address, each with its size, until it is given back.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, size: int) -> None:
        """Add bytes that are not of tensors; a negative number removes them."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            # Asked for many times per operator, and makes nothing.
            return func(*args, **kwargs)
        try:
            result = _run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Unpredictable(f"{func} depends on the values of its tensors") from error
        made = _storages(result)
        if unknown := made.keys() - self._alive.keys():
            # Weights and what else was there before are not counted.
            for address in unknown - _storages((args, kwargs)).keys():
                if size := made[address].nbytes():
                    self._alive[address] = weakref.ref(made[address], partial(self._forget, address, size))
                    self.hold(size)
        return result

    def _forget(self, address: int, size: int, _: object) -> None:
        del self._alive[address]
        self.live -= size


def _storages(values: object) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested values by their addresses."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an operator's result, on tensors without memory by one that knows its shape."""
    if func is _GROUPED and isinstance(args[0], FakeTensor):
        # torch 2.13 knows the shape of experts' products only in bf16.
        left, right, *others = args
        return func(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **kwargs).to(left.dtype)
    if func is _INDEXED and isinstance(args[0], FakeTensor):
        # The shape depends only on the number of a mask's entries.
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            known = is_mask and not isinstance(index, FakeTensor)
            indices += [torch.zeros(int(index.sum()), dtype=torch.long)] * index.dim() if known else [index]
        args = (args[0], indices, *args[2:])
    return func(*args, **kwargs)


def take_memory(module: torch.nn.Module, *, zeros: bool = False) -> None:
    """Put tensors without memory, or real `zeros`, in the place of a module's weights on any device; buffers stay."""
    mode: AbstractContextManager[Any] = nullcontext() if zeros else _FakeTensorMode(allow_non_fake_inputs=True)
    # Two names of one weight stay so.
    replaced: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, weight in owner._parameters.items():
            if weight is None:
                continue
            if id(weight) not in replaced:
                with mode:
                    empty = torch.zeros(weight.shape, dtype=weight.dtype, device="cpu")
                replaced[id(weight)] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
            owner._parameters[name] = replaced[id(weight)]
    # Addresses of tensors without memory are only compared, as real ones would be.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")


# Parameters of models whose kernels are run, with zeros for weights: nothing is quicker without them.
SMALL = 10_000_000

PlannedRole = Literal["policy", "critic", "reference", "teacher", "reward"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How a run builds one of its models, as far as that matters to memory."""

    path: str
    role: PlannedRole
    load: LoadSettings
    checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""
    reentrant: bool = False
    entropy: bool = False

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.path, trust_remote_code=self.load.trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What matters of a model's weights for its memory."""

    parameters: int
    weight_bytes: int
    trained: int
    """Parameters that get gradients."""
    trained_bytes: int
    largest_trained: int
    """Parameters of the largest weight that gets a gradient."""
    matrices: int
    """Trained parameters in weights of two dimensions and more, which the optimizer updates together."""
    saved_bytes: int = 0
    """What weights in 4 bits take less than when they are read."""
    merging_bytes: int = 0
    """What a merged weight of the largest layer with an adapter takes in half precision: in fp32, then rounded."""

    @property
    def read_bytes(self) -> int:
        """What the weights take when they are read or written."""
        return self.weight_bytes + self.saved_bytes

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelSize:
        weights = list(model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        adapted = [layer_weights(layer)[0] for layer in adapted_layers(model).values()]
        merged = [MASTER_BYTES * one.numel() + one.nbytes for one in adapted if one.itemsize < MASTER_BYTES]
        return cls(
            parameters=sum(weight.numel() for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
            trained=sum(weight.numel() for weight in trained),
            trained_bytes=sum(weight.nbytes for weight in trained),
            largest_trained=max((weight.numel() for weight in trained), default=0),
            matrices=sum(weight.numel() for weight in trained if weight.dim() > 1),
            merging_bytes=max(merged, default=0),
        )

    def in_4bit(self, weights: Sequence[torch.Tensor]) -> ModelSize:
        """Return the size with these of its weights in 4 bits, of which the largest is whole for a layer's pass."""
        saved = sum(weight.nbytes - packed_bytes(weight.numel()) for weight in weights)
        saved -= max(weight.nbytes for weight in weights)
        return replace(self, weight_bytes=self.weight_bytes - saved, saved_bytes=saved)


@dataclass(frozen=True, kw_only=True)
class EmptyModel:
    """A run's model without memory for its weights, which runs passes all the same."""

    role: PlannedRole
    actor: KitActor | KitValueModel
    size: ModelSize

    @property
    def size_in_4bit(self) -> ModelSize:
        """Return its size if the language model's linear layers are in 4 bits."""
        layers = [name for name in language_layers(self.actor.model, self.actor.kit) if ".lora_" not in name]
        return self.size.in_4bit([self.actor.model.get_submodule(name).weight for name in layers])

    @property
    def is_trained(self) -> bool:
        return self.role in ("policy", "critic")

    def pass_bytes(self, batch: Sequence[ModelSample], *, entropy: bool = False) -> int:
        """Return the peak of a pass over the batch, without weights, optimizer and accumulated gradients.

        For models that are trained it has a backward pass, in which each gradient is taken away when it is complete.

        Args:
            entropy: whether the policy's pass computes entropies.
        """

        def take(weight: torch.Tensor) -> None:
            weight.grad = None

        settings = {"policy": {"return_entropy": entropy}, "reward": {"of_samples": True}}.get(self.role, {})
        try:
            with two_slices(), LiveMemory() as memory, torch.set_grad_enabled(self.is_trained):
                trained = [one for one in self.actor.parameters() if one.requires_grad] if self.is_trained else []
                hooks = [weight.register_post_accumulate_grad_hook(take) for weight in trained]
                self.actor.train(self.is_trained)
                values, output = self.actor(batch, return_output=True, **settings)
                values = values + output.entropy if entropy else values
                # Text trains nothing where only the vision tower or the projector is trained.
                if values.requires_grad:
                    values.sum().backward()
        except (RuntimeError, TypeError) as error:
            # A kernel of the model does not accept tensors without memory.
            raise Unpredictable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        for hook in hooks:
            hook.remove()
        return memory.peak


def empty_model(settings: ModelSettings) -> EmptyModel:
    """Return a checkpoint's model as a run builds it, from its config only."""
    actor: KitActor | KitValueModel
    if settings.role == "critic" or settings.role == "reward":
        actor = KitValueModel(settings.path, settings.role, settings.load, value_head_prefix="score", empty=True)
    else:
        actor = KitActor(settings.path, settings.load, empty=True)
    size = ModelSize.of(actor)
    take_memory(actor, zeros=size.parameters <= SMALL)
    model = EmptyModel(role=settings.role, actor=actor, size=size)
    if settings.checkpointing and model.is_trained:
        actor.gradient_checkpointing_enable({"use_reentrant": settings.reentrant})
    return model


def ordinary_token(checkpoint: Checkpoint) -> int:
    """Return an id that the checkpoint's config names for no purpose."""
    named, _ = tree_flatten_with_path(checkpoint.config.to_dict())
    # A list of ids has its place in the list after the name.
    names = [[str(step.key) for step in path if isinstance(step, MappingKey)][-1] for path, _ in named]
    taken = {one for name, (_, one) in zip(names, named, strict=True) if name.endswith(("_id", "_index"))}
    return next(token for token in range(len(taken) + 1) if token not in taken)


def sample_of(prompt: Sequence[int], response: Sequence[int], *, media: SampleMedia) -> ModelSample:
    """Return one sample of a prompt; several of them have the prompt in common."""
    return ModelSample(
        token_ids=torch.tensor([*prompt, *response]),
        loss_mask=torch.arange(1, len(prompt) + len(response)) >= len(prompt),
        media=media,
        group=0,
        prompt_tokens=len(prompt),
    )


# Numbers that DeepSpeed's bucket of gradients holds (`reduce_bucket_size`), which is made whole for every pass.
BUCKET = 500_000_000
# Numbers of whole weights that ZeRO-3 keeps at most (`stage3_max_live_parameters`), and updates at a time.
LIVE_WEIGHTS = SUB_GROUP = 1_000_000_000
MASTER_BYTES = 4
MOMENTS = 2
# AdamW without a fused kernel makes a square root, and a quotient of it, of a whole group of weights.
ADAM_TEMPORARIES = 2
NORM_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The settings of a run and its machine that decide how a model's states are stored."""

    stage: int
    ranks: int
    """Ranks that share the states."""
    offload: bool
    """Whether the optimizer's state is in the host's memory."""
    weight_bytes: int
    sum_bytes: int
    """Bytes of a number in the accumulated gradients."""
    on_gpu: bool
    """With a GPU, AdamW makes no temporaries, and buffers take their memory when they are made."""
    passes: int
    """Passes of one optimizer step."""
    moment_bytes: int = MASTER_BYTES
    """Bytes of a number in each of AdamW's two moments."""
    muon: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainedStates:
    """Bytes of one rank; those of the update come in addition to the permanent ones."""

    weights: int
    master: int = 0
    """The copy in single precision that the optimizer updates."""
    moments: int = 0
    sums: int = 0
    """Gradients that are kept from pass to pass."""
    backward: int = 0
    """Held while a backward pass runs."""
    after_backward: int = 0
    """In addition to the sums, when the last gradient has been computed."""
    step: int = 0
    """In addition to the sums, during the optimizer step."""
    host: int = 0
    """In host memory, if the optimizer state is there."""

    @property
    def asleep_in_host(self) -> int:
        """Bytes of these states in host memory."""
        return self.master + self.moments + self.sums

    @property
    def steady(self) -> int:
        return self.weights + self.asleep_in_host

    def peak(self, pass_bytes: int) -> int:
        """Return the peak of update passes that each hold this much in addition to the states."""
        return self.steady + max(self.backward + pass_bytes, self.after_backward, self.step)


def gathered_bytes(size: ModelSize) -> int:
    """Return the bytes of gathered weights that ZeRO-3 holds during a pass, in addition to its shards."""
    width = size.weight_bytes // max(size.parameters, 1)
    return min(size.weight_bytes, width * LIVE_WEIGHTS)


def trained_states(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    """Return what a rank keeps of a model that is trained."""
    stage, width, ranks = zero.stage, zero.weight_bytes, zero.ranks if zero.stage else 1
    # Whether gradients go to their sums as they come (`optimizer_step.add_up_on_one_rank`).
    alone = stage == 2 and ranks == 1 and not zero.offload and not zero.muon
    own = -(-size.trained // ranks)
    # What the optimizer updates at a time, and the single-precision gradients of it.
    group = min(own, SUB_GROUP) if stage == 3 else -(-size.matrices // ranks)
    single = MASTER_BYTES * group
    temporaries = single * (0 if zero.on_gpu else ADAM_TEMPORARIES + MOMENTS * (zero.moment_bytes != MASTER_BYTES))
    # With ZeRO-1 every rank has all gradients until the step.
    sums = zero.sum_bytes * (own if stage >= 2 else size.trained) if stage == 3 or alone or zero.passes > 1 else 0
    # Without a GPU a bucket takes what is in it.
    bucket = width * (BUCKET if zero.on_gpu else min(BUCKET, size.trained))
    # The norm of the gradients is computed weight by weight.
    norm = NORM_BYTES * -(-size.largest_trained // (ranks if stage == 3 else 1))
    # The weights are the masters where they are in single precision and nobody shares them.
    has_master = width < MASTER_BYTES or not (alone or stage == 0)
    kept = TrainedStates(
        weights=size.weight_bytes,
        master=MASTER_BYTES * own if has_master else 0,
        moments=zero.moment_bytes * MOMENTS * own,
        sums=size.trained_bytes if stage == 0 else sums,
    )
    if stage == 0:
        # In half precision gradients are copied for the step; an update makes temporaries weight by weight.
        by_weight = 0 if zero.on_gpu else ADAM_TEMPORARIES * MASTER_BYTES * size.largest_trained
        return replace(kept, step=kept.master + by_weight)
    if alone:
        copied = 0 if zero.sum_bytes == MASTER_BYTES else single
        return replace(kept, backward=width * size.largest_trained, step=copied + temporaries)
    # On a GPU, gradients are reduced while a pass still holds its activations; on a CPU they take memory as they come.
    if stage == 3:
        reduced = width * min(BUCKET, size.trained)
        held = gathered_bytes(size) + reduced + -(-reduced // zero.ranks)
        kept = replace(
            kept,
            weights=-(-size.weight_bytes // zero.ranks) + bucket,
            backward=held if zero.on_gpu else gathered_bytes(size),
            after_backward=held,
            step=max(norm, single + max(single, temporaries)),
        )
    else:
        # What is reduced is copied out of the bucket, and stays until the next pass.
        partition = width * own
        of_sums = zero.sum_bytes if zero.passes > 1 else width
        copied = of_sums * group + (single if of_sums != MASTER_BYTES else 0)
        kept = replace(
            kept,
            backward=bucket + partition if zero.on_gpu else width * size.trained,
            after_backward=bucket + partition,
            # The temporaries come when the group's own gradients are gone.
            step=partition + max(norm, copied, single + temporaries - min(sums, zero.sum_bytes * group)),
        )
    if zero.offload:
        # In the host's memory, with the gradients and, before ZeRO-3, what goes back to the weights.
        host, back = kept.master + kept.moments + own * (zero.sum_bytes + MASTER_BYTES), width * size.largest_trained
        kept = replace(kept, master=0, moments=0, sums=0, step=norm, host=host)
        if stage < 3:
            kept = replace(kept, weights=size.weight_bytes + back, host=host + width * own + back + temporaries)
            kept = replace(kept, backward=bucket if zero.on_gpu else kept.backward, after_backward=bucket + norm)
    return kept

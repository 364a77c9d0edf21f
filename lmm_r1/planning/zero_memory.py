"""What DeepSpeed 0.19.6 keeps of a model that is trained, by ZeRO stage (https://arxiv.org/abs/1910.02054).

Every number is for one rank. Without a GPU, host memory holds what would be on the GPU without offloading.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmm_r1.config.model_checks import EIGHT_BIT
from lmm_r1.planning.pass_memory import ModelSize

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
    """What of a run's settings, and of its machine, decides how a model's states are kept."""

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

    @property
    def sums_alone(self) -> bool:
        """Whether gradients go to their sums as they come (`optimizer_step.add_up_on_one_rank`)."""
        return self.stage == 2 and self.ranks == 1 and not self.offload and not self.muon

    @property
    def temporaries(self) -> int:
        """Single-precision numbers per weight that an update without a GPU creates in addition to the gradient."""
        return ADAM_TEMPORARIES if self.moment_bytes == MASTER_BYTES else ADAM_TEMPORARIES + MOMENTS


@dataclass(frozen=True, kw_only=True)
class TrainedStates:
    """Bytes of one rank; those of the update come in addition to the permanent ones."""

    weights: int
    master: int
    """The copy in single precision that the optimizer updates."""
    moments: int
    sums: int
    """Gradients that are kept from pass to pass."""
    backward: int
    """Held while a backward pass runs."""
    per_gradient: int
    """Held of each gradient, per number, until the backward pass is over."""
    after_backward: int
    """Beside the sums, when the last gradient is there."""
    step: int
    """Beside the sums, in the optimizer's step."""
    host: int
    """In host memory, if the optimizer state is there."""

    @property
    def sleeping(self) -> int:
        """What is left on the device when all but the weights waits in the host's memory."""
        return self.weights

    @property
    def asleep_in_host(self) -> int:
        """What that is."""
        return self.master + self.moments + self.sums

    @property
    def steady(self) -> int:
        return self.weights + self.master + self.moments + self.sums

    def peak(self, pass_bytes: int) -> int:
        """Return the peak of update passes that each hold this much in addition to the states."""
        return self.steady + max(self.backward + pass_bytes, self.after_backward, self.step)


def moment_bytes(optim: str) -> int:
    """Return the bytes of a number in the means of an optimizer, by its name in `--optim`."""
    return 1 if optim in EIGHT_BIT else MASTER_BYTES


def gathered_bytes(size: ModelSize) -> int:
    """Return the bytes of gathered weights that ZeRO-3 holds during a pass, in addition to its shards."""
    width = size.weight_bytes // max(size.parameters, 1)
    return min(size.weight_bytes, width * LIVE_WEIGHTS)


def trained_states(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    """Return what a rank keeps of a model that is trained."""
    if zero.stage == 3:
        return _stage_3(size, zero)
    if zero.stage == 0:
        return _stage_0(size, zero)
    if zero.sums_alone:
        return _sums_alone(size, zero)
    return _stage_1_and_2(size, zero)


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _stage_1_and_2(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    own, width = _share(size.trained, zero.ranks), zero.weight_bytes
    group = _share(size.matrices, zero.ranks)
    # With ZeRO-1 every rank has all gradients until the step.
    gradients = own if zero.stage == 2 else size.trained
    several = zero.passes > 1
    sums = zero.sum_bytes * gradients if several else 0
    bucket = width * (BUCKET if zero.on_gpu else 0)
    # Copied out of the bucket when that is reduced.
    partition = width * own
    backward = bucket + (partition if zero.on_gpu else 0)
    per_gradient = 0 if zero.on_gpu else width
    filled = bucket or width * min(BUCKET, size.trained)
    norm = NORM_BYTES * size.largest_trained
    if zero.offload:
        temporary = width * size.largest_trained
        # Master copy, its gradient, moments, what goes back to the weights, and the sums of gradients.
        host = own * (MASTER_BYTES * (2 + MOMENTS) + width + zero.sum_bytes) + temporary
        return TrainedStates(
            weights=size.weight_bytes + temporary,
            master=0,
            moments=0,
            sums=0,
            backward=bucket,
            per_gradient=per_gradient,
            after_backward=filled + norm,
            step=norm,
            host=host if zero.on_gpu else host + ADAM_TEMPORARIES * MASTER_BYTES * group,
        )
    # A flat copy of the gradients, then that in single precision.
    flat = (zero.sum_bytes if several else width) * group
    single = MASTER_BYTES * group
    copied = flat + (single if (zero.sum_bytes if several else width) != MASTER_BYTES else 0)
    temporaries = 0 if zero.on_gpu else zero.temporaries * MASTER_BYTES * group
    # The optimizer's temporaries come when the group's own gradients are gone.
    freed = min(sums, zero.sum_bytes * group)
    return TrainedStates(
        weights=size.weight_bytes,
        master=MASTER_BYTES * own,
        moments=zero.moment_bytes * MOMENTS * own,
        sums=sums,
        backward=backward,
        per_gradient=per_gradient,
        after_backward=filled + partition,
        # What was copied out of the bucket stays until the next pass.
        step=partition + max(norm, copied, single + temporaries - freed),
        host=0,
    )


def _sums_alone(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    """Each gradient is freed when it is added to its sum, which the optimizer takes; weights in fp32 are the masters."""
    single = 0 if zero.sum_bytes == MASTER_BYTES else MASTER_BYTES * size.matrices
    temporaries = 0 if zero.on_gpu else zero.temporaries * MASTER_BYTES * size.matrices
    return TrainedStates(
        weights=size.weight_bytes,
        master=MASTER_BYTES * size.trained if zero.weight_bytes < MASTER_BYTES else 0,
        moments=zero.moment_bytes * MOMENTS * size.trained,
        sums=zero.sum_bytes * size.trained,
        backward=zero.weight_bytes * size.largest_trained,
        per_gradient=0,
        after_backward=0,
        step=single + temporaries,
        host=0,
    )


def _stage_0(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    """Every rank has all; in half precision gradients are copied into single precision for the step."""
    half = zero.weight_bytes < MASTER_BYTES
    largest = ADAM_TEMPORARIES * MASTER_BYTES * size.largest_trained
    return TrainedStates(
        weights=size.weight_bytes,
        master=MASTER_BYTES * size.trained if half else 0,
        moments=zero.moment_bytes * MOMENTS * size.trained,
        sums=size.trained_bytes,
        backward=0,
        per_gradient=0,
        after_backward=0,
        step=(MASTER_BYTES * size.trained if half else 0) + (0 if zero.on_gpu else largest),
        host=0,
    )


def _stage_3(size: ModelSize, zero: ZeroSettings) -> TrainedStates:
    own, width = _share(size.trained, zero.ranks), zero.weight_bytes
    group = min(own, SUB_GROUP)
    gathered = gathered_bytes(size)
    bucket = width * (BUCKET if zero.on_gpu else min(BUCKET, size.trained))
    norm = NORM_BYTES * _share(size.largest_trained, zero.ranks)
    # A bucket is reduced as one tensor, which is copied together, and into another one.
    reduced = width * min(BUCKET, size.trained)
    reduced += _share(reduced, zero.ranks)
    sums, master, moments = zero.sum_bytes * own, MASTER_BYTES * own, zero.moment_bytes * MOMENTS * own
    single = MASTER_BYTES * group
    temporaries = 0 if zero.on_gpu else zero.temporaries * single
    return TrainedStates(
        weights=_share(size.weight_bytes, zero.ranks) + bucket,
        master=0 if zero.offload else master,
        moments=0 if zero.offload else moments,
        sums=0 if zero.offload else sums,
        # Without a GPU, buckets are reduced when the activations are gone.
        backward=gathered + (reduced if zero.on_gpu else 0),
        per_gradient=0,
        after_backward=gathered + reduced,
        step=norm if zero.offload else max(norm, 2 * single, single + temporaries),
        # The single-precision gradients of all groups wait there as well.
        host=master + moments + sums + MASTER_BYTES * own if zero.offload else 0,
    )

"""Actors of a kit that run samples one by one, padded or packed, and how their results are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.engines import disturb
from helpers.packed_batches import DoubleThroughout, Results
from helpers.tiny_models import make_actor

from lmm_r1.checkpoints.merge_job import in_double
from lmm_r1.models.actor import KitActor

# Largest difference of a log-prob or entropy; of a gradient, relative to its norm. Some 40 operations in a row, each a sum
# of up to 339 terms (the vocabulary), round by sqrt(40 x 339) x eps in the mean: 7e-6 in fp32, 1.3e-14 in fp64.
SINGLE = 1e-5
DOUBLE = 1e-12
# Of a gradient that is zero but for rounding (that of a bias of attention's keys), relative to the norm of them all.
ZERO = 1e-7


@dataclass(frozen=True, kw_only=True)
class Actors:
    """The same weights with stock attention, which runs samples one by one or padded, and with packed sequences."""

    stock: KitActor
    packing: KitActor

    @contextmanager
    def running(self, way: str, *, mode: str = "eval") -> Iterator[KitActor]:
        actor = self.stock if way == "padded" else self.packing
        actor.share_prefix = way == "shared"
        actor.train(mode == "train")
        yield actor
        actor.eval()

    @contextmanager
    def in_double_precision(self) -> Iterator[None]:
        for actor in (self.stock, self.packing):
            in_double(actor.model)
        with DoubleThroughout():
            yield
        for actor in (self.stock, self.packing):
            actor.model.float()


def make_actors(folder: Path, **settings: Any) -> Actors:
    settings = {"temperature": 0.8, "ban_media_tokens": True, **settings}
    stock, packing = make_actor(folder, **settings), make_actor(folder, packing_samples=True, **settings)
    # Some weights start at zero: those of Gemma 3's projector, without which images do not matter, and of adapters.
    disturb(stock, seed=1)
    packing.model.load_state_dict(stock.model.state_dict())
    assert (stock.packing_samples, packing.packing_samples) == (False, True)
    return Actors(stock=stock, packing=packing)


def zeros(gradients: dict[str, torch.Tensor]) -> set[str]:
    """Return the parameters whose gradient, in double precision, is zero but for rounding."""
    return {name for name, gradient in gradients.items() if gradient.norm() < DOUBLE * norm_of(gradients)}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()


def check(mine: Results, theirs: Results, *, tolerance: float, zero: set[str]) -> None:
    """Compare what both have; which parameters have a gradient at all is for the test to say."""
    for values, others in ((mine.log_probs, theirs.log_probs), (mine.entropies, theirs.entropies)):
        for one, other in zip(values, others, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
    total = norm_of(theirs.gradients)
    for name, gradient in mine.gradients.items():
        error = (gradient.double() - theirs.gradients[name].double()).norm()
        assert error <= (ZERO * total if name in zero else tolerance * theirs.gradients[name].double().norm()), name

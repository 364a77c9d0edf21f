"""The weights of a DeepSpeed ZeRO checkpoint, gathered from its shards, as a kit's model.

Such a checkpoint is made of pickles, and reading one runs what it says: only for files that the user names and trusts.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lmm_r1.checkpoints.merging import listed
from lmm_r1.config.shared import LoraConfig
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.weight_files import check_weights
from lmm_r1.models.adapters import add_adapters, chosen_layers, dequantized_tensors

HEAD = "head.weight"  # a value head's name in training
_INNER = "model."  # in front of the names of the model inside of a value model
_WRAPPERS = ("module.", "base_model.model.")
_FACTOR = ".lora_A.default.weight"
_MAGNITUDE = ".lora_magnitude_vector.default.weight"
_LATEST = "latest"
_SHARDS = "*_optim_states.pt"
# Of ZeRO 1 and 2, with the whole weights in the precision of the training.
_WHOLE = "mp_rank_00_model_states.pt"
_DAMAGED = (OSError, ValueError, KeyError, IndexError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedWeights:
    """What a ZeRO checkpoint holds, in fp32 but for what was frozen, under the names of the kit's model.

    What the run had in 4 bits is whole.
    """

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    head: torch.Tensor | None
    """The weight (1, H) of a critic's value head."""

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the layers that have an adapter."""
        return tuple(name.removesuffix(_FACTOR) for name in self.tensors if name.endswith(_FACTOR))

    @property
    def rank(self) -> int:
        """Of the adapters; 0 without any."""
        return self.tensors[f"{self.adapted[0]}{_FACTOR}"].shape[0] if self.adapted else 0

    @property
    def use_dora(self) -> bool:
        """Whether the adapters have magnitudes."""
        return any(name.endswith(_MAGNITUDE) for name in self.tensors)


def checkpoint_folder(path: Path, *, tag: str | None) -> Path:
    """Return the folder with the shards: `path` itself, or the one in it that `tag` or its file `latest` names.

    Raises UserError where there is none.
    """
    if not path.is_dir():
        raise UserError(f"--checkpoint {path}: no such folder; give what --ckpt.path named, or a folder in it")
    if tag is None and any(path.glob(_SHARDS)):
        return path
    inner = [name for name in ("_actor", "_critic") if (path / name).is_dir()]
    latest = path / _LATEST
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag is None and inner:
        raise UserError(
            f"--checkpoint {path}: holds the models {' and '.join(inner)} of an RL run; "
            f"give one of them: {' or '.join(str(path / name) for name in inner)}"
        )
    if tag is None:
        raise UserError(f"--checkpoint {path}: no file `{_LATEST}` in this folder; name a checkpoint with --tag")
    folder = path / tag
    if not any(folder.glob(_SHARDS)):
        known = sorted(child.name for child in path.iterdir() if any(child.glob(_SHARDS)))
        raise UserError(
            f"--checkpoint {path}: no ZeRO checkpoint {tag} in it (no {_SHARDS}); "
            + (f"there are {', '.join(known)}" if known else "give what --ckpt.path named")
        )
    return folder


def read_weights(folder: Path) -> TrainedWeights:
    """Gather a checkpoint's weights with DeepSpeed's own functions; raises UserError where shards are missing.

    The files are pickles, and what they say is run.
    """
    from lmm_r1.host.zero import get_fp32_state_dict_from_zero_checkpoint

    try:
        # It prints as it goes on, and draws bars.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            gathered = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
            whole = _whole_weights(folder / _WHOLE)
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: this ZeRO checkpoint cannot be read ({reason}); copy it again") from error
    plain = dequantized_tensors(whole)
    restored = {name: plain[name] for name in plain if plain[name] is not whole[name]}
    # DeepSpeed leaves out of a stage 1 checkpoint what was frozen, which stands in the file of whole weights.
    tensors = {_bare(name): tensor for name, tensor in {**plain, **gathered, **restored}.items()}
    head = tensors.pop(HEAD, None)
    if head is not None:
        tensors = {name.removeprefix(_INNER): tensor for name, tensor in tensors.items()}
    return TrainedWeights(folder=folder, tensors=tensors, head=head)


def _whole_weights(file: Path) -> dict[str, torch.Tensor]:
    if not file.is_file():
        return {}
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)["module"]


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def load_trained(
    path: str,
    weights: TrainedWeights,
    *,
    lora_alpha: int | None,
    use_rslora: bool = False,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Return the kit's model at `path` with a checkpoint's weights in place of its own, in evaluation mode.

    Its adapters are in it, unmerged. A critic's model has no output layer. Raises UserError where names or shapes
    differ, which is to say that another model was trained.

    Args:
        lora_alpha: what the run had; None where the checkpoint has no adapters.
        use_rslora: whether it divides by the root of the rank.
    """
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    kit = checkpoint.kit
    check_weights(path)
    model = checkpoint.load_model(dtype=dtype, attn_implementation="sdpa")
    if weights.adapted:
        assert lora_alpha is not None, "refused by the command"
        strange = sorted(set(weights.adapted) - set(chosen_layers(model, kit, ("all-linear",))))
        if strange:
            raise _another_model(weights, path, f"no linear layer for the adapters of {listed(strange)}")
        settings = LoraConfig(
            rank=weights.rank,
            alpha=lora_alpha,
            dropout=0.0,
            target_modules=weights.adapted,
            use_dora=weights.use_dora,
            use_rslora=use_rslora,
        )
        add_adapters(model, kit, settings)
    if weights.head is not None:
        from lmm_r1.models.value_model import drop_output_layer

        drop_output_layer(model)
    _fill(model, weights, path=path)
    return model.to(dtype).eval()


def _fill(model: PreTrainedModel, weights: TrainedWeights, *, path: str) -> None:
    own = model.state_dict()
    missing = [name for name in own if name not in weights.tensors]
    unexpected = [name for name in weights.tensors if name not in own]
    if missing or unexpected:
        raise _another_model(
            weights,
            path,
            f"{len(missing)} of its tensors are not in the checkpoint"
            + (f" ({listed(missing)})" if missing else "")
            + f", and {len(unexpected)} of the checkpoint's not in the model"
            + (f" ({listed(unexpected)})" if unexpected else ""),
        )
    wrong = [
        f"{name} {tuple(weights.tensors[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if weights.tensors[name].shape != tensor.shape
    ]
    if wrong:
        raise _another_model(weights, path, f"other shapes: {listed(wrong)}")
    model.load_state_dict(weights.tensors)


def _another_model(weights: TrainedWeights, path: str, reason: str) -> UserError:
    return UserError(
        f"{weights.folder}: does not fit --base {path}: {reason}; give the model that the run started from"
    )

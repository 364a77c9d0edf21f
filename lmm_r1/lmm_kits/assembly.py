"""Puts a vision-language checkpoint together: a released language model, a vision tower, a new projector."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModel, AutoTokenizer, Dinov2Config, PreTrainedTokenizerBase

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import Checkpoint, check_unquantized, settle_ends, torch_dtype
from lmm_r1.lmm_kits.kit import LmmKit
from lmm_r1.lmm_kits.registry import KITS, get_kit, stored_config

RANDOM = "random"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps", "patch_size")
_NEW = dict(zip(_SIZES, (192, 4, 3, "gelu", 1e-6, 14), strict=True)) | {"intermediate_size": 768}
# Of training with masked patches, and of a pooled output.
_UNUSED = ("embeddings.mask_token", "head.")
_PATCHES, _POSITIONS = "embeddings.patch_embeddings.projection.weight", "embeddings.position_embeddings"
# The language model's own template gets texts, with marks for media.
_AS_TEXTS = """\
{%- set given = namespace(turns=[]) -%}
{%- for turn in messages -%}{%- set said = namespace(text='') -%}
{%- set whole = turn.content is string or not turn.content -%}
{%- for part in turn.content if not whole -%}
{%- set said.text = said.text + (part.text if part.type == 'text' else MARKS[part.type]) -%}
{%- endfor -%}
{%- set given.turns = given.turns + [turn if whole else dict(turn, content=said.text)] -%}
{%- endfor -%}{%- set messages = given.turns -%}
"""


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """How `lmm-r1 make_vlm` puts a checkpoint together."""

    language_models: tuple[str, ...]
    """The `model_type` of the language models that both transformers and vLLM run in it."""
    tokens: tuple[str, ...]
    """Special tokens in the order of the released ids; the tokenizer gets those that it lacks."""
    marks: Mapping[str, str]
    """What the chat template writes for media, by the type of the part; of an image it is the token and blanks."""
    scales: tuple[int, ...]
    """How many patches along each side can become one token, the preferred one first."""
    settings: Callable[..., dict[str, object]]
    """Returns what the config says of a scale and of the tokens of a tile."""
    parts: Callable[..., dict[str, object]]
    """Returns the processor's parts for the side, the tokens and the greatest number of tiles."""
    tower: Mapping[str, object] = field(default_factory=dict)
    """Settings of the vision config."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns in a released tower's names, and what the architecture has instead."""


def assemble(
    kit: LmmKit, language: Checkpoint, *, vision: str, side: int, tiles: int, seed: int, folder: Path
) -> dict[str, tuple[int, str]]:
    """Write the checkpoint to `folder`, and return the parameters of each part and where they come from.

    Every weight keeps its precision. Raises UserError for parts that do not fit together.
    """
    assembly, path, kind = kit.assembly, language.path, language.config.model_type
    if assembly is None:
        known = ", ".join(name for name in sorted(KITS) if get_kit(name).assembly is not None)
        raise UserError(f"--arch {kit.model_type}: its checkpoints cannot be assembled; known: {known}")
    if kind not in assembly.language_models:
        known = " or ".join(assembly.language_models)
        raise UserError(f"{path}: a {kit.model_type} takes a language model of the type {known}, and this is a {kind}")
    check_unquantized(language.config, path=path)
    sizes, released = _read_tower(vision)
    grid, scale = _grid(assembly, side=side, patch=sizes["patch_size"])
    dtype = torch_dtype("auto", config=language.config)
    spoken = language.kit.load_model(path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    tokenizer = _tokenizer(language, kit, assembly, folder)
    added = _enlarge(spoken, rows=max(tokenizer.get_vocab().values()) + 1)
    config = kit.config_class(
        text_config={**language.config.to_dict(), "vocab_size": spoken.config.vocab_size},
        vision_config={**sizes, **assembly.tower, "image_size": side},
        image_token_id=tokenizer.convert_tokens_to_ids(assembly.marks["image"].strip()),
        tie_word_embeddings=spoken.config.tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        **assembly.settings(scale=scale, tokens=(grid // scale) ** 2),
    )
    torch.manual_seed(seed)
    model = kit.model_class_of(config)._from_config(config, dtype=dtype)
    _take(kit.language_model_of(model), language.kit.language_model_of(spoken).state_dict(), source=path)
    if not config.tie_word_embeddings:
        _take(model.get_output_embeddings(), spoken.get_output_embeddings().state_dict(), source=path)
    if released:
        tower = model.get_submodule(kit.vision_prefixes[0].rstrip("."))
        _take(tower, dict(_placed(released, assembly, grid=grid)), source=vision)
    model.tie_weights()
    parts = assembly.parts(side=side, tiles=tiles, tokens=(grid // scale) ** 2)
    processor = kit.processor_class(tokenizer=tokenizer, chat_template=tokenizer.chat_template, **parts)
    model.generation_config = spoken.generation_config
    settle_ends(model, kit=kit, processor=processor)
    model.save_pretrained(folder)
    # It would be that of the tower, whose weights come first.
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    processor.save_pretrained(folder)

    def count(prefixes: tuple[str, ...]) -> int:
        return sum(weight.numel() for name, weight in model.named_parameters() if name.startswith(prefixes))

    return {
        "language model": (count(kit.language_prefixes), f"released ({kind}), {added} embeddings new"),
        "vision tower": (count(kit.vision_prefixes), "released" if released else "new"),
        "projector": (count(kit.projector_prefixes), f"new, {(grid // scale) ** 2} tokens for a tile"),
    }


def _read_tower(source: str) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """Return a tower's sizes, by their names in a config of SigLIP, and its weights by their published names.

    A new one, which is small, has no weights. Raises UserError for a source without a vision tower.
    """
    if source == RANDOM:
        return _NEW, {}
    if source.endswith(".onnx"):
        weights = _onnx_weights(Path(source))
        width, layers = len(weights["layernorm.bias"]), {name.split(".")[2] for name in weights if ".layer." in name}
        # All of DINOv2's heads have 64 dimensions.
        config = Dinov2Config(hidden_size=width, num_hidden_layers=len(layers), num_attention_heads=width // 64)
        config.patch_size = weights[_PATCHES].shape[-1]
    else:
        stored_config(source)
        model, report = AutoModel.from_pretrained(source, dtype="auto", output_loading_info=True)
        model = getattr(model, "vision_model", model)
        config, fresh = model.config, {name.removeprefix("vision_model.") for name in report["missing_keys"]}
        weights = {
            name: one for name, one in model.state_dict().items() if not (name in fresh or name.startswith(_UNUSED))
        }
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    sizes["intermediate_size"] = next(
        (len(one) for name, one in weights.items() if name.endswith("mlp.fc1.bias")), None
    )
    if None in sizes.values():
        raise UserError(f"{source}: no vision tower of the layout of DINOv2 or SigLIP; give one of them")
    return sizes, weights


def _grid(assembly: Assembly, *, side: int, patch: int) -> tuple[int, int]:
    """Return the patches along a side of a tile, and how many of them along each side become one token."""
    grid, merged = side // patch, assembly.scales[0]
    scale = next((scale for scale in assembly.scales if side % (patch * scale) == 0), None)
    if scale is None:
        near = max(1, round(side / patch / merged)) * patch * merged
        raise UserError(f"--side {side}: {merged} x {merged} patches of {patch} pixels become one token; give {near}")
    return grid, scale


def _tokenizer(language: Checkpoint, kit: LmmKit, assembly: Assembly, folder: Path) -> PreTrainedTokenizerBase:
    """Return the language model's tokenizer with media tokens, whose names it gets on loading, so it goes to `folder`."""
    tokenizer = language.tokenizer
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in assembly.tokens])
    tokenizer.chat_template = _AS_TEXTS.replace("MARKS", repr(dict(assembly.marks))) + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=dict(kit.tiny_tokens.names))


@torch.no_grad()
def _enlarge(model: Any, *, rows: int) -> int:
    """Give the model embeddings for so many tokens if it has fewer, each the mean of all; return how many are new."""
    held = model.get_input_embeddings().num_embeddings
    if rows <= held:
        return 0
    model.resize_token_embeddings(rows, pad_to_multiple_of=64, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight[held:] = part.weight[:held].float().mean(dim=0)
    return model.get_input_embeddings().num_embeddings - held


def _placed(
    weights: Mapping[str, torch.Tensor], assembly: Assembly, *, grid: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tower's weights with their names in the architecture, and with positions for `grid` x `grid` patches."""
    for name, weight in weights.items():
        if "position_embedding" in name and (side := math.isqrt(weight.shape[-2])) != grid:
            rows = weight.reshape(-1, weight.shape[-1])
            # A class token comes first.
            first, patches = rows[: len(rows) - side**2], rows[len(rows) - side**2 :]
            square = patches.float().T.reshape(1, -1, side, side)
            square = torch.nn.functional.interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False)
            made = torch.cat([first, square.flatten(2)[0].T.to(rows.dtype)])
            weight = made.reshape(*weight.shape[:-2], *made.shape)
        for pattern, own in assembly.renamed:
            name = re.sub(pattern, own, name)
        yield name, weight


def _take(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, source: str) -> None:
    """Put released weights into a module; raises UserError if one is missing, left over or of another shape."""
    wanted = {name: list(weight.shape) for name, weight in module.state_dict().items()}
    given = {name: list(weight.shape) for name, weight in weights.items()}
    wrong = [name for name in sorted({*wanted, *given}) if wanted.get(name) != given.get(name)]
    if wrong:
        told = (f"{name} is {given.get(name, 'missing')}, expected {wanted.get(name, 'none')}" for name in wrong[:5])
        raise UserError(f"{source}: {len(wrong)} weights do not fit {type(module).__name__}: {'; '.join(told)}")
    module.load_state_dict(weights, assign=True)


def _onnx_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return DINOv2's weights in an ONNX file by their published names; raises UserError if some have none.

    An export keeps the names of biases only: a matrix is stored for products from the left, and folded constants are nameless.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError(f"{file}: ONNX files are read by the package onnx; pip install 'lmm-r1[convert]'") from error
    try:
        graph = onnx.load(file).graph
    except (DecodeError, OSError) as error:
        raise UserError(f"{file}: not a readable ONNX file ({error})") from error
    stored = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in graph.initializer}
    matrices = {
        node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in stored
    }
    for node in graph.node:
        bias = next((name for name in node.input if name in stored and name.endswith(".bias")), "")
        matrix = next((matrices[name] for name in node.input if name in matrices), None)
        if node.op_type == "Add" and bias and matrix in stored:
            stored[bias.removesuffix("bias") + "weight"] = stored.pop(matrix).T.contiguous()
    prefix = next((name.removesuffix(_PATCHES) for name in stored if name.endswith(_PATCHES)), None)
    if prefix is None or f"{prefix}layernorm.bias" not in stored:
        raise UserError(f"{file}: no weights of DINOv2 ({_PATCHES}, layernorm.bias) in this file")
    weights = {
        name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix) and "." in name
    }
    weights.pop(_UNUSED[0], None)
    width = len(weights["layernorm.bias"])
    # Shapes and scales are smaller.
    nameless = sorted(
        (one for name, one in stored.items() if "." not in name and one.numel() >= width), key=torch.numel
    )
    if _POSITIONS not in weights and [one.shape[::2] for one in nameless] == [(1, width)] * 2:
        weights[_POSITIONS] = torch.cat(nameless, dim=1)
    elif nameless:
        raise UserError(f"{file}: {list(nameless[0].shape)}, an unnamed constant, is not a DINOv2 weight")
    return weights

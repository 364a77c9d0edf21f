"""A checkpoint in Microsoft's original format (`phi4mm`) written again in transformers' format, shard by shard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerFast,
)

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.phi4_multimodal.original_format import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    Source,
    account,
    adapter_scaling,
    native_config,
)
from lmm_r1.lmm_kits.phi4_multimodal.towers import TURN_END, chat_template
from lmm_r1.lmm_kits.weight_files import check_weights

SHARD_BYTES = 4 * 10**9
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # of an element, as safetensors names its kind


def convert(source: Path, output: Path) -> list[str]:
    """Write the checkpoint in folder `source` to the empty folder `output` and return sentences on what was done.

    The image adapter is merged into the language model, where Microsoft's code uses it with every prompt that has an
    image; a prompt without one, for which that code leaves it out, is answered with it too. The adapter for speech is
    left out: it takes turns with the other, and this project has no audio.
    """
    check_weights(str(source))
    settings = _read_json(source / "config.json")
    scaling = adapter_scaling(settings)
    tokenizer = _load_tokenizer(source)
    with ExitStack() as stack:
        files = _open_weights(source, stack)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        config = native_config(settings, shapes=shapes, token_ids=_token_ids(tokenizer, source))
        wanted = _native_shapes(config)
        sources, left_out = account(wanted, files)
        _check_shapes(sources, wanted, shapes)
        _write_weights(_merged(sources, files, scaling), _sizes(sources, files), output)
    config.save_pretrained(output)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(output)
    _write_processor(source, tokenizer, output)
    merged = sum(one.adapter is not None for one in sources.values())
    sentences = [f"the image adapter is merged into {merged} matrices of the language model, scaled by {scaling:g}"]
    if left_out:
        sentences.append(f"the speech adapter is left out: {len(left_out)} weights, {left_out[0]} and so on")
    return sentences


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); copy it from the original checkpoint again") from error


def _open_weights(source: Path, stack: ExitStack) -> dict[str, Any]:
    """Return for every weight the memory-mapped file that holds it."""
    index = source / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (source / "model.safetensors").is_file():
        if not index.is_file():
            raise UserError(
                f"{source}: the weights are not in safetensors files; take the checkpoint that has them so"
            )
        names = set(_read_json(index)["weight_map"].values())
    opened = [stack.enter_context(safe_open(source / name, framework="pt")) for name in sorted(names)]
    return {name: file for file in opened for name in file.keys()}


def _native_shapes(config: Phi4MultimodalConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of what transformers saves for the config."""
    with torch.device("meta"):
        model = Phi4MultimodalForCausalLM(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items() if name not in tied}


def _check_shapes(
    sources: Mapping[str, Source], wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]
) -> None:
    for name, source in sources.items():
        found = given[source.name]
        if found != wanted[name]:
            raise UserError(
                f"{source.name} is {found}, and by config.json it must be {wanted[name]}; one is not its own"
            )
        if source.adapter is None:
            continue
        (rank, columns), (rows, other_rank) = (given[factor] for factor in source.adapter)
        if (rows, columns) != found or rank != other_rank:
            raise UserError(f"{' and '.join(source.adapter)} do not fit {source.name} of {found}; copy them again")


def _merged(
    sources: Mapping[str, Source], files: Mapping[str, Any], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight under its new name, the adapter's product added in fp32 and rounded once."""
    for name, source in sources.items():
        weight = files[source.name].get_tensor(source.name)
        if source.adapter is not None:
            a, b = (files[factor].get_tensor(factor).float() for factor in source.adapter)
            weight = (weight.float() + scaling * (b @ a)).to(weight.dtype)
        yield name, weight


def _sizes(sources: Mapping[str, Source], files: Mapping[str, Any]) -> dict[str, int]:
    """Return every weight's size in bytes, without reading it."""
    slices = {name: files[source.name].get_slice(source.name) for name, source in sources.items()}
    return {name: _BYTES[part.get_dtype()] * math.prod(part.get_shape()) for name, part in slices.items()}


def _write_weights(weights: Iterator[tuple[str, torch.Tensor]], sizes: Mapping[str, int], output: Path) -> None:
    """Write the weights in files of at most `SHARD_BYTES`, with an index where there are several."""
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = dict(next(weights) for _ in shard)
        save_file(tensors, output / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (output / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _load_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    # Not by the auto class: the original's config names a tokenizer on the hub.
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source}: no tokenizer.json; copy the original checkpoint's tokenizer files into it")
    return PreTrainedTokenizerFast.from_pretrained(
        source, extra_special_tokens={"image_token": IMAGE_TOKEN, "audio_token": AUDIO_TOKEN}
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast, source: Path) -> dict[str, int]:
    vocabulary = tokenizer.get_vocab()
    tokens = {IMAGE_TOKEN: IMAGE_TOKEN, AUDIO_TOKEN: AUDIO_TOKEN, "turn": TURN_END, "end": tokenizer.eos_token}
    for token in tokens.values():
        if token not in vocabulary:
            raise UserError(f"{source}: the tokenizer has no {token}; copy the original checkpoint's tokenizer files")
    return {key: vocabulary[token] for key, token in tokens.items()}


def _write_processor(source: Path, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write image processor, feature extractor and tokenizer, with a chat template that has images in it."""
    settings = _read_json(source / "preprocessor_config.json")
    if "dynamic_hd" not in settings:
        raise UserError(f"{source}/preprocessor_config.json: no dynamic_hd, the most crops of an image; copy it again")
    template = chat_template(image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)
    tokenizer.chat_template = template
    audio = {key: value for key, value in settings.items() if key.startswith("audio_")}
    Phi4MultimodalProcessor(
        image_processor=Phi4MultimodalImageProcessor(dynamic_hd=settings["dynamic_hd"]),
        audio_processor=Phi4MultimodalFeatureExtractor(**audio),
        tokenizer=tokenizer,
        chat_template=template,
    ).save_pretrained(output)

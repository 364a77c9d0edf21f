"""Make a Hugging Face checkpoint of a GGUF file: `lmm-r1 convert_checkpoint MODEL.gguf --output DIR`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.declared import ArgumentPlace
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, written_folder

PROG = "lmm-r1 convert_checkpoint"
DESCRIPTION = "Write the language model of a GGUF file, dequantized, as a checkpoint that all commands take."
# How a byte-level tokenizer cuts a text before it merges, by `tokenizer.ggml.pre`. transformers does not read this field.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, kw_only=True)
class ConvertCheckpointConfig:
    file: Annotated[Path, ArgumentPlace("MODEL.gguf")]
    """A GGUF file of an instruct model."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the written weights."""


CONFIG = ConvertCheckpointConfig


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(ConvertCheckpointConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if not config.file.is_file():
            raise UserError(f"{config.file}: no such file; check the path")
        if importlib.util.find_spec("gguf") is None:
            raise UserError("GGUF files are read by the package gguf; pip install 'lmm-r1[gguf]'")
        check_new_folder(config.output, flag="--output")
        convert(config.file, config.output, dtype=config.dtype)


def convert(file: Path, output: Path, *, dtype: str) -> None:
    """Write the checkpoint and print its size; raises UserError for a file whose model or tokenizer is not known."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    from lmm_r1.generation.request import check_turn_end
    from lmm_r1.lmm_kits import Checkpoint

    try:
        fields = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
        place = {"gguf_file": file.name, "dtype": getattr(torch, dtype)}
        model = AutoModelForCausalLM.from_pretrained(file.parent, **place)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{file}: transformers cannot read this GGUF file ({error})") from error
    tokenizer = _tokenizer(file, fields)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        config.update({**ends, "pad_token_id": tokenizer.pad_token_id})
    with written_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made = Checkpoint(str(folder))
        check_turn_end(made.kit, made.processor, path=str(folder), model=str(file))
    count = sum(weight.numel() for weight in model.parameters())
    print(
        f"{output}: {model.config.model_type}, {count:,} parameters in {dtype}; a turn ends with {tokenizer.eos_token}"
    )


def _tokenizer(file: Path, fields: Mapping[str, Any]) -> Any:
    """Return the file's tokenizer, with its special tokens and its chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if fields.get("tokenizer.chat_template") is None:
        raise UserError(f"{file}: this file has no chat template; convert the one of an instruct model")
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    if ids["eos"] is None:
        raise UserError(f"{file}: this file does not say which token ends a response")
    # A file without a padding token pads with its end token, which is masked by length.
    ids["padding"] = ids["eos"] if ids["padding"] is None else ids["padding"]
    if fields["tokenizer.ggml.model"] == "gpt2":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(file, fields))
    else:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for name, place in ids.items():
        role = {"unknown": "unk", "padding": "pad"}.get(name, name)
        setattr(tokenizer, f"{role}_token", None if place is None else tokens[place])
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _byte_level(file: Path, fields: Mapping[str, Any]) -> Any:
    """Return the byte-level tokenizer of a file, which begins no text with a token of its own."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut, tokens = fields.get("tokenizer.ggml.pre", "gpt-2"), fields["tokenizer.ggml.tokens"]
    if cut not in CUTS:
        raise UserError(f"{file}: its tokenizer cuts texts as {cut!r}; known: {', '.join(CUTS)}")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    words, by_bytes = CUTS[cut], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=CUTS[cut] is None)
    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if words is None
        else pre_tokenizers.Split(Regex(words), "isolated")
    )
    made.pre_tokenizer = by_bytes if cut == "gpt-2" else pre_tokenizers.Sequence([first, by_bytes])
    made.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        made.normalizer = normalizers.NFC()
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    made.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    made.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])
    return made


if __name__ == "__main__":
    run_command(main)

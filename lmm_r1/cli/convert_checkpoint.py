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
            raise UserError("GGUF files are read by the package gguf; pip install 'lmm-r1[convert]'")
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
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
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
    print(f"{output}: {model.config.model_type}, {count:,} parameters, {dtype}; turns end with {tokenizer.eos_token}")


def _tokenizer(file: Path, fields: Mapping[str, Any]) -> Any:
    """Return the file's tokenizer, with its special tokens and its chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from lmm_r1.lmm_kits.llm import byte_level_tokenizer

    if fields.get("tokenizer.chat_template") is None:
        raise UserError(f"{file}: this file has no chat template; convert the one of an instruct model")
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    if ids["eos"] is None:
        raise UserError(f"{file}: this file does not say which token ends a response")
    if ids["padding"] is None:
        ids["padding"] = ids["eos"]
    if fields["tokenizer.ggml.model"] == "gpt2":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(fields, file=file))
    else:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for name, place in ids.items():
        role = {"unknown": "unk", "padding": "pad"}.get(name, name)
        setattr(tokenizer, f"{role}_token", None if place is None else fields["tokenizer.ggml.tokens"][place])
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


if __name__ == "__main__":
    run_command(main)

"""Tiny checkpoints and the models made of them: of every kit, with other sizes or rope parameters, and the demo's."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from helpers.passes import logits_of, next_log_probs
from helpers.processes import warm_python

from lmm_r1.config.shared import LoraConfig
from lmm_r1.data.images import load_video
from lmm_r1.data.messages import Message, images_of, videos_of
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor, KitValueModel
from lmm_r1.models.loading import LoadSettings

_LORA = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
_LORA |= {name: name for name in ("target_modules", "use_rslora")}
_OWN = ("temperature", "ban_media_tokens", "ds_config", "empty", "value_head_prefix", "normalize_reward")


def flat_settings(given: dict[str, Any]) -> tuple[LoadSettings, dict[str, Any]]:
    """Return the settings, and what a model's constructor takes next to them."""
    lora = LoraConfig(**{_LORA[name]: value for name, value in given.items() if name in _LORA})
    loaded = {name: value for name, value in given.items() if name not in _LORA and name not in _OWN}
    return LoadSettings(**loaded, lora=lora), {name: given[name] for name in _OWN if name in given}


def flat_actor(path: str, **given: Any) -> KitActor:
    settings, own = flat_settings(given)
    return KitActor(path, settings, **own)


def flat_value_model(path: str, kind: Literal["critic", "reward"], **given: Any) -> KitValueModel:
    settings, own = flat_settings(given)
    return KitValueModel(path, kind, settings, **own)


CORPUS = (
    "system\nYou are a helpful assistant.",
    "user\nWhat is 12 + 34? Which digit does the picture show?",
    "assistant\n<think>12 + 34 = 46</think><answer>46</answer>",
)
# Of a run's samples; what the smallest models with longrope take with its short factors.
MAX_LEN = 4096

# Mixtures of experts, with what their configs call the number of experts.
MIXTURES: dict[str, dict[str, object]] = {"Mixtral": {"num_local_experts": 4, "intermediate_size": 32}, "Qwen3Moe": {}}


def altered(kit: LmmKit, **members: object) -> LmmKit:
    """Return a kit that differs from the given one in some attributes or methods; it does not pickle."""
    return type(f"Altered{type(kit).__name__}", (type(kit),), members)()


def build_checkpoint(kit: LmmKit, folder: Path) -> None:
    """Write the smallest checkpoint that the kit can build."""
    folder.mkdir(exist_ok=True)
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, CORPUS, folder)


def build_experts(language_model: Path, folder: Path, *, architecture: str = "Qwen3Moe", **sizes: object) -> None:
    """Write a tiny mixture of experts with the tokenizer of the language model kit's tiny checkpoint."""
    kit = get_kit("llm")
    processor = kit.load_processor(str(language_model), trust_remote_code=False)
    settings = {
        "vocab_size": len(processor),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**settings | sizes)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def encode(kit: LmmKit, processor: object, messages: Sequence[Message]) -> EncodedPrompt:
    """Encode with the generation prompt; the images and the videos' frames are those in the messages."""
    images = [part.source for part in images_of(messages)]
    videos = [load_video(part, location="test") for part in videos_of(messages)]
    return kit.encode(processor, messages, images=images, videos=videos, add_generation_prompt=True)


def make_actor(folder: Path, *, attention: str = "sdpa", param_dtype: str = "fp32", **settings: object) -> KitActor:
    """Return the checkpoint's actor, in evaluation mode."""
    settings = {"max_len": MAX_LEN, **settings}
    return flat_actor(str(folder), attn_implementation=attention, param_dtype=param_dtype, **settings).eval()


def pad(rows: Sequence[Sequence[int]], *, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and attention mask, (B, T) each, with zeros on the given side."""
    width = max(map(len, rows))
    sequences, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, ids in enumerate(rows):
        place = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        sequences[index, place] = torch.tensor(ids)
        mask[index, place] = 1
    return sequences, mask


# Released with them.
LONGROPE = ("llm", "phi3_v", "phi4_multimodal")


def with_rope(folder: Path, copy: Path, **rope: Any) -> Path:
    """Copy a checkpoint with other rope parameters beside its own."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] |= rope
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_longrope(folder: Path, length: int, *, copy: Path, **rope: Any) -> Path:
    """Copy a checkpoint with other factors for samples longer than `length`."""
    config = json.loads((folder / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    frequencies = int(head * config["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
    factors = {"short_factor": [1.0] * frequencies, "long_factor": [1.0 + index for index in range(frequencies)]}
    with_rope(folder, copy, rope_type="longrope", original_max_position_embeddings=length, **factors | rope)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": length}))
    return copy


# Those whose load can be balanced. Their experts are computed by a grouped matmul, which takes no fp64, unless told otherwise.
BALANCED_KITS = ("glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe")


def reshaped(kit: LmmKit, tiny: Path, folder: Path, settings: Mapping[str, object]) -> Path:
    """Write a checkpoint like the tiny one, with other sizes in its language model and buffers that do something."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= settings
    torch.manual_seed(0)
    model = kit.model_class(kit.config_class(**config))
    text = model.config.get_text_config()
    kit.tune_tiny(
        model,
        TinyModelSpec(
            hidden_size=text.hidden_size,
            layers=text.num_hidden_layers,
            seed=0,
            tie_embeddings=model.config.tie_word_embeddings,
        ),
    )
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, prompt: EncodedPrompt, **settings: Any) -> torch.Tensor:
    """Return a prompt's logits (1, T, V) as the checkpoint's actor with these settings computes them."""
    actor = make_actor(folder, **settings)
    sequences, mask = pad([prompt.token_ids], side="right")
    with torch.no_grad():
        return logits_of(actor, sequences, attention_mask=mask, media=[prompt.media])


COLD_START = Path(__file__).parents[2] / "examples/scripts/lmm_r1/configs/demo/cold_start.yaml"
STEPS = 60
DIGITS = ("--min_digits", "1", "--max_digits", "2", "--max_image_digits", "1", "--seed", "1")


def run_command(command: str, *arguments: object) -> None:
    """Run a command to its end; raises CalledProcessError where it fails."""
    subprocess.run([warm_python(), "-m", f"lmm_r1.cli.{command}", *map(str, arguments)], check=True)


def build_demo(folder: Path) -> None:
    """Write `tiny`, `model` and the rows `text` and `image` into a folder."""
    run_command("make_tiny_model", "--arch", "qwen2_5_vl", "--seed", 1, "--output", folder / "tiny")
    task = ("make_task", "digits", *DIGITS)
    run_command(*task, "--modality", "mixed", "--solutions", "--rows", 32 * STEPS, "--output", folder / "solutions")
    for modality in ("text", "image"):
        run_command(*task, "--modality", modality, "--split", "test", "--rows", 16, "--output", folder / modality)
    run_command(
        "train_sft",
        *(
            "--config",
            COLD_START,
            "--model.model_name_or_path",
            folder / "tiny",
            "--data.dataset",
            folder / "solutions",
        ),
        *("--ckpt.output_dir", folder / "model", "--ckpt.disable_ds", "--train.max_steps", STEPS),
    )


def positions_seen(model: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model and return the position ids that its language model rotates by, and its logits."""
    (rotary,) = (
        module
        for name, module in model.named_modules()
        if name in ("model.rotary_emb", "model.language_model.rotary_emb", "model.text_model.rotary_emb")
    )
    seen = []
    hook = rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([*args, *kwargs.values()][1]), with_kwargs=True
    )
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    hook.remove()
    return seen[0], logits


def check_batch(
    actor: KitActor, rows: Sequence[tuple[list[int], Mapping[str, torch.Tensor] | None]], *, side: str
) -> None:
    """See that each row of a padded batch, ids and media, has the log-probs that it has alone."""
    sequences, mask = pad([ids for ids, _ in rows], side=side)
    with torch.no_grad():
        batch = next_log_probs(actor, sequences, attention_mask=mask, media=[media for _, media in rows])  # (B, T - 1)
        for index, (ids, media) in enumerate(rows):
            sequence = torch.tensor([ids])
            alone = next_log_probs(actor, sequence, attention_mask=torch.ones_like(sequence), media=[media])[0]
            first = 0 if side == "right" else sequences.shape[1] - len(ids)
            torch.testing.assert_close(batch[index, first : first + len(ids) - 1], alone, atol=1e-5, rtol=0)

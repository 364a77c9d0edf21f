"""`lmm-r1 make_vlm`: released parts keep their weights and ids, and what does not fit is refused by name."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from lmm_r1.cli import make_vlm
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.lmm_kits import Checkpoint

SIDE = 56
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "patch_size": 14, "image_size": 70}


class Exported(torch.nn.Module):
    """A tower beside another part, as in files of whole models."""

    def __init__(self, tower: Dinov2Model) -> None:
        super().__init__()
        self.backbone, self.head = tower, torch.nn.Linear(64, 3)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.backbone(pixels).last_hidden_state
        return features, self.head(features)


@pytest.fixture(scope="module")
def parts(tiny_checkpoint, tmp_path_factory) -> Path:
    """A folder with language models, `qwen2` and `llama` (tied), and towers: `dinov2`, `siglip` and `tower.onnx`."""
    folder = tmp_path_factory.mktemp("parts")
    qwen2, llama = tiny_checkpoint("llm"), folder / "llama"
    (folder / "qwen2").symlink_to(qwen2)
    config = json.loads((qwen2 / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    settings = {name: config[name] for name in kept} | {"num_hidden_layers": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16).save_pretrained(llama)
    AutoTokenizer.from_pretrained(qwen2).save_pretrained(llama)
    dinov2 = Dinov2Model(Dinov2Config(**SIZES))
    siglip = SiglipVisionModel(SiglipVisionConfig(**SIZES, intermediate_size=128))
    for name, tower in (("dinov2", dinov2), ("siglip", siglip)):
        for weight in tower.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        tower.eval().save_pretrained(folder / name)
    torch.onnx.export(Exported(dinov2).eval(), (torch.zeros(1, 3, SIDE, SIDE),), folder / "tower.onnx", dynamo=False)
    return folder


def made(parts: Path, output: Path, language: str, vision: str, arch: str, *more: str) -> Checkpoint:
    given = {"--language": parts / language, "--vision": vision if vision == "random" else parts / vision}
    flags = [str(word) for pair in given.items() for word in pair]
    make_vlm.main([*flags, "--arch", arch, "--side", str(SIDE), "--output", str(output), *more])
    return Checkpoint(str(output))


def model_of(checkpoint: Checkpoint) -> torch.nn.Module:
    settings = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": False}
    return checkpoint.kit.load_model(checkpoint.path, **settings).eval()


def check_language(checkpoint: Checkpoint, language: Path) -> None:
    """Compare ids, the chat's text, its end and all logits with the language model's own."""
    own, tokenizer = AutoTokenizer.from_pretrained(language), checkpoint.tokenizer
    chat = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "7"}]
    text = own.apply_chat_template(chat, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == (own.eos_token, own.pad_token)
    ids = torch.tensor([own(text).input_ids])
    assert tokenizer(text).input_ids == ids[0].tolist()
    before = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)(ids).logits
    after = model_of(checkpoint)(input_ids=ids).logits
    assert torch.equal(after[..., : before.shape[-1]], before)
    assert checkpoint.config.dtype == Checkpoint(str(language)).config.dtype


def logits_of_image(checkpoint: Checkpoint) -> tuple[torch.Tensor, int]:
    """Return the logits of a question with an image, and how many tokens the image has."""
    kit, image = checkpoint.kit, Image.new("RGB", (80, 60), (200, 30, 60))
    message = Message(role="user", parts=(ImagePart(image), TextPart("What colour?")))
    encoded = kit.encode(checkpoint.processor, [message], images=[image], add_generation_prompt=True)
    ids = torch.tensor([encoded.token_ids])
    inputs = kit.forward_inputs(checkpoint.config, ids, torch.ones_like(ids), encoded.media)
    tokens = encoded.token_ids.count(checkpoint.config.image_token_id)
    return model_of(checkpoint)(input_ids=ids, **inputs).logits, tokens


@pytest.mark.parametrize("vision", ["dinov2", "tower.onnx"])
@pytest.mark.parametrize("language", ["qwen2", "llama"])
def test_weights_of_dinov2_give_the_same_features(parts, tmp_path, capsys, language, vision):
    checkpoint = made(parts, tmp_path / "vlm", language, vision, "internvl")
    pixels = torch.randn(1, 3, SIDE, SIDE)
    if vision == "dinov2":
        expected = Dinov2Model.from_pretrained(parts / vision).eval()(pixels).last_hidden_state
    else:
        run = ReferenceEvaluator(onnx.load(parts / vision))
        expected = torch.from_numpy(run.run(None, {run.input_names[0]: pixels.numpy()})[0])
    features = model_of(checkpoint).model.vision_tower(pixels).last_hidden_state
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)
    check_language(checkpoint, parts / language)
    logits, tokens = logits_of_image(checkpoint)
    assert tokens == 4
    assert logits.isfinite().all()
    printed = capsys.readouterr().out
    assert "vision tower           139,200  released" in printed
    assert "projector               21,120  new, 4 tokens for a tile" in printed


@pytest.mark.parametrize("vision", ["siglip", "random"])
def test_smolvlm_takes_siglip_and_has_the_released_tokens(parts, tmp_path, vision):
    checkpoint = made(parts, tmp_path / "vlm", "llama", vision, "smolvlm", "--tiles", "2")
    check_language(checkpoint, parts / "llama")
    # As in the release, whose language model has 49,152 tokens.
    own = len(AutoTokenizer.from_pretrained(parts / "llama"))
    assert len(checkpoint.tokenizer) == own + 128
    assert checkpoint.config.image_token_id - own == 49190 - 49152
    assert checkpoint.tokenizer.convert_tokens_to_ids("<end_of_utterance>") - own == 49279 - 49152
    _, tokens = logits_of_image(checkpoint)
    assert tokens == 5, "two rows and two columns of tiles, and the whole image"
    if vision == "siglip":
        tower, pixels = SiglipVisionModel.from_pretrained(parts / vision).eval(), torch.randn(1, 3, SIDE, SIDE)
        expected = tower(pixels, interpolate_pos_encoding=True).last_hidden_state
        features = model_of(checkpoint).model.vision_model(pixels).last_hidden_state
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("language", "vision", "arch", "more", "told"),
    [
        (
            "llama",
            "siglip",
            "internvl",
            (),
            "do not fit InternVLVisionModel: embeddings.cls_token is missing, expected [1",
        ),
        ("llama", "dinov2", "smolvlm", (), "embeddings.cls_token is [1, 1, 64], expected none"),
        ("qwen2", "random", "smolvlm", (), "takes a language model of the type llama, and this is a qwen2"),
        ("llama", "qwen2", "internvl", (), "no vision tower of the layout of DINOv2 or SigLIP"),
        ("llama", "random", "internvl", ("--side", "100"), "2 x 2 patches of 14 pixels become one token; give 112"),
        ("llama", "random", "llm", (), "cannot be assembled; known: internvl, smolvlm"),
        ("llama", "llama/tokenizer.json.onnx", "internvl", (), "not a readable ONNX file"),
    ],
)
def test_what_does_not_fit_is_refused(parts, tmp_path, capsys, language, vision, arch, more, told):
    with pytest.raises(SystemExit):
        made(parts, tmp_path / "vlm", language, vision, arch, *more)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "vlm").exists()


def test_an_onnx_file_with_a_weight_without_a_name_is_refused(parts, tmp_path, capsys):
    model = onnx.load(parts / "tower.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(torch.zeros(1, 4, 64).numpy(), "onnx::Concat_1"))
    onnx.save(model, parts / "registers.onnx")
    with pytest.raises(SystemExit):
        made(parts, tmp_path / "vlm", "llama", "registers.onnx", "internvl")
    assert "[1, 1, 64], an unnamed constant, is not a DINOv2 weight" in capsys.readouterr().err

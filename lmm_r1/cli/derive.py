"""Derive a kit for an architecture that has none: build a small random model of it, and check what works."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lmm_r1.checkpoints.merging import load_with_adapter
from lmm_r1.config.shared import LoraConfig
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object, write_json_object
from lmm_r1.generation.codec import check_turn_end
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, kit_of
from lmm_r1.lmm_kits.derived import CAPABILITIES, CONFIG_KEY, Capability, Confirmation, DerivedKit, KitFile, write_kit
from lmm_r1.lmm_kits.discovery import SIZES, Discovery, Unsupported, first_line, picture, write_small
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import ADAPTER_FOLDER, adapted_layers
from lmm_r1.models.kit_module import KitModule
from lmm_r1.models.loading import LoadSettings
from lmm_r1.models.packed.attention import packing_refusal
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.self_check import CheckSample, check_packing, results, text_ids
from lmm_r1.models.value_model import KitValueModel
from lmm_r1.supervised.samples import encode_sample

# Of a log-prob or a value, in fp32; what is wrong moves them by a hundred times as much.
TOLERANCE = 1e-4
# Of a log-prob of vLLM, whose kernels round differently.
ENGINE_TOLERANCE = 1e-3
ENGINE_SECONDS = 900
MAX_LEN = 1024
QUESTION, ANSWER = "Which digit is this?", "46"


class Unconfirmed(UserError):
    """Why a check does not confirm a capability."""


def derive(model: str, output: Path) -> Mapping[Capability, Confirmation]:
    """Return what works for a model whose architecture has no kit, and write its kit to a file if it can be trained."""
    if (own := _own_kit(model)) is not None:
        raise UserError(f"--derive {model}: the architecture has a kit, {own}; it needs no derived one")
    with tempfile.TemporaryDirectory(prefix="lmm-r1-derive-") as folder:
        try:
            kit = Discovery(*write_small(model, Path(folder))).kit_file()
        except Unsupported as error:
            findings = dict.fromkeys(CAPABILITIES, Confirmation(confirmed=False, reason="needs sft"))
            return {**findings, "sft": Confirmation(confirmed=False, reason=str(error))}
        kit = Checks(folder=Path(folder), file=kit).confirmed()
    if kit.capabilities["sft"].confirmed:
        write_kit(kit, output)
    return {name: kit.capabilities[name] for name in CAPABILITIES}


def _own_kit(model: str) -> str | None:
    try:
        kit = kit_of(model)
    except UserError:
        return None
    return None if isinstance(kit, DerivedKit) else kit.model_type


class Checks:
    """The checks of a kit file on a small checkpoint, whose config gets it."""

    def __init__(self, *, folder: Path, file: KitFile) -> None:
        self.folder = folder
        self.file = file

    def confirmed(self) -> KitFile:
        """Return the kit file with what each check finds; what needs another capability is off without it."""
        for name in CAPABILITIES:
            self._write()
            needed: Sequence[Capability] = ("sft", "packed") if name == "shared_prefix" else ("sft",)
            if name == "merge":
                needed = ("sft", "lora")
            missing = next((other for other in needed if other != name and not self._has(other)), None)
            if name == "video":
                finding = Confirmation(confirmed=False, reason="not checked")
            elif missing is not None:
                finding = Confirmation(confirmed=False, reason=f"needs {missing}")
            else:
                finding = _found(getattr(self, name))
            self.file = replace(self.file, capabilities={**self.file.capabilities, name: finding})
        return self.file

    def _has(self, name: Capability) -> bool:
        return self.file.capabilities[name].confirmed

    def _write(self) -> None:
        config = self.folder / "config.json"
        write_json_object(config, {**read_json_object(config), CONFIG_KEY: self.file.data})

    @cached_property
    def kit(self) -> LmmKit:
        return kit_of(str(self.folder))

    @cached_property
    def processor(self) -> Any:
        return self.kit.load_processor(str(self.folder), trust_remote_code=False)

    @cached_property
    def stock(self) -> KitActor:
        return self._actor()

    def _actor(self, folder: Path | None = None, **settings: Any) -> KitActor:
        return KitActor(str(folder or self.folder), _settings(**settings)).eval()

    def _encode(self, *parts: str | tuple[int, int], answer: str | None = None) -> EncodedPrompt:
        messages, images = _asked(*parts)
        if answer is not None:
            messages = [*messages, Message(role="assistant", parts=(TextPart(answer),))]
        return self.kit.encode(self.processor, messages, images=images, add_generation_prompt=answer is None)

    @cached_property
    def samples(self) -> list[CheckSample]:
        """Samples with an image, of text, with two images, and a second one of the first prompt."""
        words = text_ids(self.stock.model_config, banned=self._banned)
        prompts = [
            self._encode((140, 84), QUESTION),
            self._encode(QUESTION),
            self._encode((84, 112), "Add it to", (56, 56), QUESTION),
        ]
        lengths = ((0, 6), (1, 4), (2, 5), (0, 3))
        return [
            CheckSample(prompt=prompts[place].token_ids, response=words(length), media=prompts[place].media)
            for place, length in lengths
        ]

    @property
    def _banned(self) -> tuple[int, ...]:
        config = self.kit.load_config(str(self.folder), trust_remote_code=False)
        return self.kit.banned_token_ids(config, self.processor.tokenizer)

    @cached_property
    def alone(self) -> list[torch.Tensor]:
        """The results of each sample by itself."""
        return [result for sample in self.samples for result in results(self.stock, [sample])]

    def sft(self) -> str:
        """Check encoding, positions, padding and saving; return what was found."""
        self._check_encoding()
        self._check_spelled_tokens()
        self._check_positions()
        self._check_images_count()
        self._check_causal()
        off = largest(results(self.stock, self.samples[:2]), self.alone[:2])
        _require(off, "in a padded batch, log-probs differ from those of each sample")
        off = largest(results(self.stock, self.samples), self.alone)
        _require(off, "in a batch with images of several samples, log-probs differ from those of each sample")
        self._check_filler()
        self._check_reloading()
        return "ids, positions, padding, mixed batches, and saving agree with transformers"

    def _check_encoding(self) -> None:
        one, other = self._encode((84, 112), QUESTION), self._encode((140, 84), QUESTION)
        both = self._encode((84, 112), "Add it to", (140, 84), QUESTION)
        place = self.processor.tokenizer.convert_tokens_to_ids(self.file.placeholder)
        counts = [encoded.token_ids.count(place) for encoded in (one, other, both)]
        if counts[0] + counts[1] != counts[2]:
            raise Unconfirmed(
                f"two images have {counts[2]} placeholders, but {counts[0]} and {counts[1]} by themselves"
            )
        kept = self.kit.collapsed(self.processor, both.token_ids)
        if kept != both.engine_token_ids:
            raise Unconfirmed("expanded images cannot be found again in the ids")
        check_turn_end(self.kit, self.processor, path=str(self.folder), model="the tokenizer")
        both_kinds: tuple[tuple[str | tuple[int, int], ...], ...] = ((QUESTION,), ((84, 112), QUESTION))
        for parts in both_kinds:
            prompt, whole = self._encode(*parts), self._encode(*parts, answer=ANSWER)
            if whole.token_ids[: len(prompt.token_ids)] != prompt.token_ids:
                raise Unconfirmed("the chat template writes an answer in another way than it begins one to generate")
            self._check_loss(parts)

    def _check_loss(self, parts: Sequence[str | tuple[int, int]]) -> None:
        """Check which tokens of a demonstration SFT trains on."""
        messages, _ = _asked(*parts)
        row = Row(
            messages=(*messages, Message(role="assistant", parts=(TextPart(ANSWER),))),
            answer=ANSWER,
            datasource="derive",
            location="a demonstration",
        )
        sample = encode_sample(row, kit=self.kit, processor=self.processor, max_len=2**20, every_turn=False)
        assert sample is not None, "no row is so long"
        learned = [token for token, counts in zip(sample.token_ids, sample.loss_mask, strict=True) if counts]
        text = self.processor.tokenizer.decode(learned)
        if ANSWER not in text or learned[-1] != self.processor.tokenizer.eos_token_id:
            raise Unconfirmed(f"SFT would train on {text!r} for the answer {ANSWER}")

    def _check_spelled_tokens(self) -> None:
        place = self.processor.tokenizer.convert_tokens_to_ids(self.file.placeholder)
        spelled = " ".join(self.file.media_tokens)
        counts = [self._encode((84, 112), text).token_ids.count(place) for text in (QUESTION, f"{QUESTION} {spelled}")]
        if counts[0] != counts[1]:
            raise Unconfirmed("media tokens that a text spells become images")

    def _check_positions(self) -> None:
        """Compare with what transformers makes of its own processor's output, without positions of ours."""
        for sample, images in ((self.samples[0], 1), (self.samples[1], 0)):
            messages, pictures = _asked(*((140, 84),) * images, QUESTION)
            text = self.kit.apply_template(self.processor, messages, add_generation_prompt=True)
            special = self.kit.adds_start(self.processor, text, opens=True)
            given = {"images": pictures} if images else {}
            batch = self.processor(text=[text], add_special_tokens=special, return_tensors="pt", **given)
            # Floating-point tensors only.
            batch = batch.to(torch.float32)
            if batch["input_ids"][0].tolist() != sample.prompt:
                raise Unconfirmed("the kit's ids are not the processor's")
            with torch.no_grad():
                theirs = self.stock.model(**batch).logits.log_softmax(-1)[0, :-1]
            wanted = theirs.gather(-1, torch.tensor(sample.prompt)[1:, None])[:, 0]
            with torch.no_grad():
                ours = self.stock([ModelSample.whole(sample.prompt, sample.media)])[0]
            _require(largest([ours], [wanted]), "log-probs differ from those of transformers' own forward")

    def _check_images_count(self) -> None:
        sample = self.samples[0]
        assert sample.media is not None, "it has an image"
        generator = torch.Generator().manual_seed(4)
        other = {
            name: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
            for name, value in sample.media.items()
        }
        moved = largest(results(self.stock, [replace(sample, media=other)]), self.alone[:1])
        if not moved > TOLERANCE:
            raise Unconfirmed(f"another image moves log-probs by {moved:.1g} only")

    def _check_causal(self) -> None:
        """Check that no token attends to later ones, and so a prompt not to its response."""
        first, *_, second = self.samples
        shared = len(first.prompt)
        rows = []
        for sample in (first, second):
            with torch.no_grad():
                rows.append(self.stock([ModelSample.whole([*sample.prompt, *sample.response], sample.media)])[0])
        off = largest([rows[0][: shared - 1]], [rows[1][: shared - 1]])
        _require(off, "a prompt attends to its response: log-probs of the prompt differ")

    def _check_filler(self) -> None:
        """Check that the blank image of ranks without images runs, and changes nothing for a text."""
        ids, media = self.kit.filler_media(self.stock.model_config) or ([], None)
        blank = CheckSample(prompt=ids, response=self.samples[1].response, media=media)
        both = results(self.stock, [self.samples[1], blank])[:1]
        _require(largest(both, self.alone[1:2]), "a blank image in the batch changes the log-probs of a text")

    def _check_reloading(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self.stock.model.save_pretrained(folder)
            self.kit.save_processor(self.processor, folder)
            again = self._actor(Path(folder))
            if again.kit != self.kit:
                raise Unconfirmed("the saved model has another kit")
            off = largest(results(again, self.samples), results(self.stock, self.samples))
        _require(off, "a saved model computes other log-probs")

    def freezing(self) -> str:
        actor = self._actor(freeze_visual_encoder=True)
        trained = {name for name, weight in actor.model.named_parameters() if weight.requires_grad}
        prefixes = (*self.file.language_prefixes, *self.file.untrained_prefixes)
        others = sorted(name for name in trained if not name.startswith(prefixes))
        if others:
            raise Unconfirmed(f"{others[0]} would be trained")
        found = reached(actor, self.samples)
        if not found or any(not name.startswith(prefixes) for name in found):
            raise Unconfirmed("gradients reach the frozen tower")
        return ", ".join((*self.file.vision_prefixes, *self.file.projector_prefixes))

    def lora(self) -> str:
        actor = self._adapted()
        layers = adapted_layers(actor.model)
        if not layers or not all(f"{name}.weight".startswith(tuple(self.file.language_prefixes)) for name in layers):
            raise Unconfirmed("no linear layers of the language model are found")
        moved = largest(results(actor, self.samples), self.alone)
        if not moved > TOLERANCE:
            raise Unconfirmed("adapters change nothing")
        return f"{len(layers)} linear layers of the language model"

    def _adapted(self) -> KitActor:
        actor = self._actor(lora=LoraConfig(rank=4, alpha=8))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight in actor.model.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
        return actor

    def merge(self) -> str:
        actor = self._adapted()
        expected = results(actor, self.samples)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            actor.save(folder, processor=self.processor, weights=actor.model.state_dict())
            off = largest(results(self._actor(Path(folder)), self.samples), expected)
            _require(off, "the merged model computes other log-probs than the adapted one")
            adapter = Path(folder) / ADAPTER_FOLDER
            again = self._actor()
            again.model = load_with_adapter(str(self.folder), adapter, dtype=torch.float32, trust_remote_code=False)
            off = largest(results(again, self.samples), expected)
        _require(off, "the saved adapter computes other log-probs")
        return f"merged and loaded adapters differ by {off:.0e}"

    def packed(self) -> str:
        return self._check_packing(share_prefix=False)

    def shared_prefix(self) -> str:
        return self._check_packing(share_prefix=True)

    def _check_packing(self, *, share_prefix: bool) -> str:
        if (refusal := packing_refusal(self._actor().model)) is not None:
            raise Unconfirmed(refusal)
        try:
            check_packing(self._actor(packing_samples=True, share_prefix=share_prefix))
        except UserError as error:
            raise Unconfirmed("in one packed sequence, log-probs differ from those of each sample") from error
        return "one packed sequence gives the log-probs of each sample"

    def critic(self) -> str:
        found = []
        for packs in dict.fromkeys((False, self._has("packed"))):
            torch.manual_seed(3)
            settings = _settings(packing_samples=packs)
            model = KitValueModel(str(self.folder), "critic", settings, value_head_prefix="score").eval()
            with torch.no_grad():
                model.head.weight.normal_()
            together = results(model, self.samples)
            alone = [value for sample in self.samples for value in results(model, [sample])]
            found.append(together)
            _require(largest(together, alone), "values in a batch differ from those of each sample")
            if not any(name.startswith(tuple(self.file.language_prefixes)) for name in reached(model, self.samples)):
                raise Unconfirmed("a loss on values reaches no weights of the language model")
        off = largest(found[0], found[-1])
        _require(off, "values of packed sequences differ")
        return f"values differ by {off:.0e}"

    def rl(self) -> str:
        """Run two steps of RL in processes of their own, and compare log-probs of vLLM with those of training."""
        tokens = len(self._encode((224, 224), QUESTION).token_ids)
        given = (str(self.folder), self.file.model_class, max(MAX_LEN, 4 * tokens))
        code = f"from lmm_r1.cli.derive import measure_engine; measure_engine(*{given!r})"
        try:
            ended = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unconfirmed(f"two steps took more than {ENGINE_SECONDS} s") from error
        *_, last = [line for line in ended.stdout.splitlines() if line.startswith("{")] or ["{}"]
        found = json.loads(last)
        if "largest" not in found:
            raise Unconfirmed(found.get("reason") or _engine_reason(ended.stderr) or "the run ended without a result")
        return f"vLLM's log-probs of text and images differ by {found['largest']:.0e} before and after an update"


def measure_engine(folder: str, architecture: str, max_len: int) -> None:
    """Print the largest distance of log-probs in two steps of RL as JSON, or the reason why there is none."""
    from vllm import ModelRegistry

    from lmm_r1.cli.kits import certify, engine_version

    engine = f"vLLM {engine_version()}"
    if architecture not in ModelRegistry.get_supported_archs():
        found: dict[str, object] = {"reason": f"{engine} has no class {architecture}"}
    elif (reason := _other_ids(folder, engine)) is not None:
        found = {"reason": reason}
    else:
        try:
            _, gaps = certify(folder, max_len=max_len, dtype="fp32", settings=None)
            found = {"largest": max(gap.largest for gap in gaps)}
            if apart := [gap for gap in gaps if not gap.largest <= ENGINE_TOLERANCE]:
                off, rows, weights = apart[0].largest, apart[0].rows, apart[0].weights
                found = {"reason": f"log-probs of vLLM and training differ by {off:.1g} for {rows} rows {weights}"}
        except UserError as error:
            found = {"reason": _engine_reason("".join(traceback.format_exception(error))) or str(error)}
    sys.stdout.write(f"{json.dumps(found)}\n")


def _other_ids(folder: str, engine: str) -> str | None:
    """Return why vLLM expands an image to other ids than the kit; None if it does not."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    kit = kit_of(folder)
    assert isinstance(kit, DerivedKit), "its config has the derived kit"
    checks = Checks(folder=Path(folder), file=kit.file)
    processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(model=folder, dtype="float32"))
    for width, height in SIZES:
        encoded = checks._encode((width, height), QUESTION)
        media = processor.info.parse_mm_data(kit.engine_media(encoded))
        try:
            written = list(processor(encoded.engine_token_ids, media)["prompt_token_ids"])
        except Exception as error:  # a class that is made for another processor may raise anything
            return f"{engine} does not take its processor ({first_line(error.__cause__ or error)})"
        if written != encoded.token_ids:
            return f"{engine} and the processor write different ids for an image of {width} x {height} pixels"
    return None


def _engine_reason(output: str) -> str | None:
    """Return the first error that a failed run names, as a part of a sentence; None if it names none."""
    wrapped = ("UserError", "ActorDiedError", "RayTaskError", "RuntimeError: Engine")
    named = [line.strip() for line in output.splitlines() if "Error: " in line]
    found = [line for line in named if not any(name in line for name in wrapped)]
    return f"vLLM cannot run it ({found[0][:200]})" if found else None


def _settings(**given: Any) -> LoadSettings:
    settings = {"attn_implementation": "sdpa", "param_dtype": "fp32", "max_len": 4096, **given}
    return LoadSettings(**settings)


def _found(check: Callable[[], str]) -> Confirmation:
    try:
        return Confirmation(confirmed=True, reason=check())
    except UserError as error:
        return Confirmation(confirmed=False, reason=str(error))
    except Exception as error:  # an unknown architecture may raise anything
        return Confirmation(confirmed=False, reason=f"the check ends with {first_line(error)}")


def _asked(*parts: str | tuple[int, int]) -> tuple[list[Message], list[Any]]:
    """Return a turn of the user with texts, and images of these sizes."""
    images = [picture(*part) for part in parts if isinstance(part, tuple)]
    made = iter(images)
    content = tuple(TextPart(part) if isinstance(part, str) else ImagePart(next(made)) for part in parts)
    return [Message(role="user", parts=content)], images


def reached(model: KitModule, samples: Sequence[CheckSample]) -> set[str]:
    """Return the names of the weights that a loss on the responses reaches."""
    torch.cat(results(model, samples)).square().sum().backward()
    return {name for name, weight in model.model.named_parameters() if weight.grad is not None}


def largest(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference; infinity if one is no number."""
    off = max((one - other).abs().max().item() for one, other in zip(values, others, strict=True))
    return off if off == off else float("inf")


def _require(off: float, otherwise: str) -> None:
    if not off <= TOLERANCE:
        raise Unconfirmed(f"{otherwise} (by {off:.1g})")

"""Derive a kit for an architecture that has none: build a small random model of it, and check what works."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lmm_r1.config.shared import LoraConfig
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object, write_json_object
from lmm_r1.generation.request import check_turn_end
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, kit_of
from lmm_r1.lmm_kits.derived import CAPABILITIES, CONFIG_KEY, Capability, Confirmation, DerivedKit, KitFile
from lmm_r1.lmm_kits.discovery import QUESTION, Discovery, Unconfirmed, first_line, picture, write_small
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers
from lmm_r1.models.loading import LoadSettings
from lmm_r1.models.packed.attention import packing_refusal
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.self_check import CheckSample, results, text_ids

# Of a log-prob or a value, in fp32; what is wrong moves them by a hundred times as much.
TOLERANCE = 1e-4
# Of a log-prob of vLLM, whose kernels round differently.
ENGINE_TOLERANCE = 1e-3
ENGINE_SECONDS = 900
MAX_LEN = 1024
ANSWER = "46"
NEEDS: Mapping[Capability, Capability | None] = {"sft": None, "shared_prefix": "packed"}
"""The capability without which another one is off; SFT by default."""
Asked: TypeAlias = str | tuple[int, int]
"""A text, or the width and height of an image."""


def derive(model: str, output: Path) -> Mapping[str, Confirmation]:
    """Return what works for a model whose architecture has no kit, and write its kit to a file if it can be trained."""
    own = None
    with suppress(UserError):
        own = kit_of(model)
    if own is not None and not isinstance(own, DerivedKit):
        raise UserError(f"--derive {model}: the architecture has a kit, {own.model_type}; it needs no derived one")
    with tempfile.TemporaryDirectory(prefix="lmm-r1-derive-") as folder:
        try:
            file = Discovery(*write_small(model, Path(folder))).kit_file()
        except Unconfirmed as error:
            reasons = dict.fromkeys(CAPABILITIES, "needs sft") | {"sft": str(error)}
            return {name: Confirmation(confirmed=False, reason=reason) for name, reason in reasons.items()}
        file = Checks(folder=Path(folder), file=file).confirmed()
    if file.capabilities["sft"].confirmed:
        write_json_object(output, file.data)
    return {name: file.capabilities[name] for name in CAPABILITIES}


class Checks:
    """The checks of a kit file on a small checkpoint, whose config gets it."""

    def __init__(self, *, folder: Path, file: KitFile) -> None:
        self.folder, self.file = folder, file
        self.checkpoint = Checkpoint(str(folder))

    def confirmed(self) -> KitFile:
        """Return the kit file with what each check finds; what needs another capability is off without it."""
        config = self.folder / "config.json"
        for name in CAPABILITIES:
            write_json_object(config, {**read_json_object(config), CONFIG_KEY: self.file.data})
            self.file = replace(self.file, capabilities={**self.file.capabilities, name: self._finding(name)})
        return self.file

    def _finding(self, name: Capability) -> Confirmation:
        needed = NEEDS.get(name, "sft")
        if needed is not None and not self.file.capabilities[needed].confirmed:
            return Confirmation(confirmed=False, reason=f"needs {needed}")
        try:
            return Confirmation(confirmed=True, reason=getattr(self, name)())
        except UserError as error:
            return Confirmation(confirmed=False, reason=str(error))
        except Exception as error:  # an unknown architecture may raise anything
            return Confirmation(confirmed=False, reason=f"the check ends with {first_line(error)}")

    @cached_property
    def stock(self) -> KitActor:
        return self._actor()

    def _actor(self, folder: Path | None = None, **settings: Any) -> KitActor:
        given = {"attn_implementation": "sdpa", "param_dtype": "fp32", "max_len": 4096, **settings}
        return KitActor(str(folder or self.folder), LoadSettings(**given)).eval()

    def _encode(self, *parts: Asked, answer: str | None = None) -> EncodedPrompt:
        messages, images = _conversation(*parts, answer=answer)
        generates, processor = answer is None, self.checkpoint.processor
        return self.checkpoint.kit.encode(processor, messages, images=images, add_generation_prompt=generates)

    def _placeholders(self, *parts: Asked) -> int:
        place = self.checkpoint.tokenizer.convert_tokens_to_ids(self.file.placeholder)
        return self._encode(*parts).token_ids.count(place)

    @cached_property
    def samples(self) -> list[CheckSample]:
        """Samples with an image, of text, with two images, and a second one of the first prompt."""
        words = text_ids(self.stock.model_config, banned=self.checkpoint.banned_token_ids)
        one, two = self._encode((140, 84), QUESTION), self._encode((84, 112), "Add it to", (56, 56), QUESTION)
        lengths = ((one, 6), (self._encode(QUESTION), 4), (two, 5), (one, 3))
        return [CheckSample(prompt=own.token_ids, response=words(n), media=own.media) for own, n in lengths]

    @cached_property
    def alone(self) -> list[torch.Tensor]:
        """The results of each sample by itself."""
        return [result for sample in self.samples for result in results(self.stock, [sample])]

    def sft(self) -> str:
        """Check encoding, positions, padding and saving; return what was found."""
        self._check_encoding()
        self._check_positions()
        together = results(self.stock, self.samples)
        agree(
            together,
            self.alone,
            "in a batch with images of several samples, log-probs differ from those of each sample",
        )
        # The blank image of ranks without images.
        ids, media = self.checkpoint.kit.filler_media(self.stock.model_config) or ([], None)
        blank = CheckSample(prompt=ids, response=self.samples[1].response, media=media)
        beside = results(self.stock, [self.samples[1], blank])[:1]
        agree(beside, self.alone[1:2], "a blank image in the batch changes the log-probs of a text")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self.stock.model.save_pretrained(folder)
            self.checkpoint.processor.save_pretrained(folder)
            again = self._actor(Path(folder))
            if again.kit != self.checkpoint.kit:
                raise Unconfirmed("the saved model has another kit")
            agree(results(again, self.samples), together, "a saved model computes other log-probs")
        return "ids, positions, padding, mixed batches, and saving agree with transformers"

    def _check_encoding(self) -> None:
        kit, processor = self.checkpoint.kit, self.checkpoint.processor
        one, other = self._placeholders((84, 112), QUESTION), self._placeholders((140, 84), QUESTION)
        both = self._placeholders((84, 112), "Add it to", (140, 84), QUESTION)
        if one + other != both:
            raise Unconfirmed(f"two images have {both} placeholders, but {one} and {other} by themselves")
        encoded = self._encode((84, 112), "Add it to", (140, 84), QUESTION)
        if kit.collapsed(processor, encoded.token_ids) != encoded.engine_token_ids:
            raise Unconfirmed("expanded images cannot be found again in the ids")
        if self._placeholders((84, 112), f"{QUESTION} {' '.join(self.file.media_tokens)}") != one:
            raise Unconfirmed("media tokens that a text spells become images")
        check_turn_end(kit, processor, path=str(self.folder), model="the tokenizer")
        both_kinds: tuple[tuple[Asked, ...], ...] = ((QUESTION,), ((84, 112), QUESTION))
        for parts in both_kinds:
            prompt, whole = self._encode(*parts).token_ids, self._encode(*parts, answer=ANSWER).token_ids
            if whole[: len(prompt)] != prompt or ANSWER not in self.checkpoint.tokenizer.decode(whole[len(prompt) :]):
                raise Unconfirmed("the chat template writes an answer in another way than it begins one to generate")

    @torch.no_grad()
    def _check_positions(self) -> None:
        """Compare prompts with what transformers makes of its own processor's output, without positions of ours.

        Here a response follows each prompt, to which its tokens must not attend.
        """
        kit, processor = self.checkpoint.kit, self.checkpoint.processor
        for sample, images in ((self.samples[0], 1), (self.samples[1], 0)):
            messages, pictures = _conversation(*((140, 84),) * images, QUESTION)
            text = kit.apply_template(processor, messages, add_generation_prompt=True)
            special = kit.adds_start(processor, text, opens=True)
            given = {"images": pictures} if images else {}
            batch = processor(text=[text], add_special_tokens=special, return_tensors="pt", **given)
            # Floating-point tensors only.
            batch = batch.to(torch.float32)
            if batch["input_ids"][0].tolist() != sample.prompt:
                raise Unconfirmed("the kit's ids are not the processor's")
            theirs = self.stock.model(**batch).logits.log_softmax(-1)[0, :-1]
            wanted = theirs.gather(-1, torch.tensor(sample.prompt)[1:, None])[:, 0]
            ours = self.stock([ModelSample.whole([*sample.prompt, *sample.response], sample.media)])[0][: len(wanted)]
            agree([ours], [wanted], "a prompt's log-probs differ from those of transformers' own forward")

    def freezing(self) -> str:
        """Check that a frozen tower leaves the language model's weights, which get gradients."""
        actor = self._actor(freeze_visual_encoder=True)
        prefixes = (*self.file.language_prefixes, *self.file.untrained_prefixes)
        trained = {name for name, weight in actor.model.named_parameters() if weight.requires_grad}
        if others := sorted(name for name in trained if not name.startswith(prefixes)):
            raise Unconfirmed(f"{others[0]} would be trained")
        torch.cat(results(actor, self.samples)).square().sum().backward()
        if all(weight.grad is None for weight in actor.model.parameters()):
            raise Unconfirmed("no gradient reaches the language model")
        return ", ".join((*self.file.vision_prefixes, *self.file.projector_prefixes))

    def lora(self) -> str:
        """Check where adapters are, that they count, and that merged ones compute the same."""
        actor = self._actor(lora=LoraConfig(rank=4, alpha=8))
        layers = adapted_layers(actor.model)
        if not layers or not all(f"{name}.weight".startswith(tuple(self.file.language_prefixes)) for name in layers):
            raise Unconfirmed("no linear layers of the language model are found")
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight in actor.model.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
        adapted = results(actor, self.samples)
        if not largest(adapted, self.alone) > TOLERANCE:
            raise Unconfirmed("adapters change nothing")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            actor.save(folder, processor=self.checkpoint.processor, weights=actor.model.state_dict())
            merged = results(self._actor(Path(folder)), self.samples)
            agree(merged, adapted, "the merged model computes other log-probs than the adapted one")
        return f"{len(layers)} linear layers of the language model"

    def shared_prefix(self) -> str:
        """Check one packed sequence in which the prompt of two samples is computed once."""
        return self.packed(share_prefix=True)

    def packed(self, **settings: Any) -> str:
        """Check all samples in one packed sequence."""
        if (refusal := packing_refusal(self.stock.model)) is not None:
            raise Unconfirmed(refusal)
        packed = results(self._actor(packing_samples=True, **settings), self.samples)
        off = agree(packed, self.alone, "in one packed sequence, log-probs differ from those of each sample")
        return f"log-probs in one packed sequence differ by {off:.0e}"

    def rl(self) -> str:
        """Compare log-probs of vLLM with those of training as `kits --parity` does, in a process of its own."""
        tokens = len(self._encode((224, 224), QUESTION).token_ids)
        given = (str(self.folder), max(MAX_LEN, 4 * tokens))
        command = [sys.executable, "-c", f"from lmm_r1.cli.derive import print_gaps; print_gaps(*{given!r})"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
        gaps = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"largest"')]
        if not gaps:
            # The first error that is not around another one.
            wrapped = ("UserError", "ActorDiedError", "RayTaskError", "RuntimeError: Engine")
            named = [line.strip() for line in ended.stderr.splitlines() if "Error: " in line]
            found = [line for line in named if not any(name in line for name in wrapped)]
            raise Unconfirmed(f"vLLM cannot run it ({found[0][:200]})" if found else "the run ended without a result")
        for gap in gaps:
            if not gap["largest"] <= ENGINE_TOLERANCE:
                apart = f"{gap['largest']:.1g} for {gap['rows']} rows {gap['weights']}"
                raise Unconfirmed(f"log-probs of vLLM and training differ by {apart}")
        off = max(gap["largest"] for gap in gaps)
        return f"vLLM's log-probs of text and images differ by {off:.0e} before and after an update"


def print_gaps(folder: str, max_len: int) -> None:
    """Print one line of JSON for each log-prob gap that `kits --parity` measures in fp32."""
    from lmm_r1.cli.kits import certify

    _, gaps = certify(folder, max_len=max_len, dtype="fp32", settings=None)
    for gap in gaps:
        sys.stdout.write(json.dumps({"largest": gap.largest, "rows": gap.rows, "weights": gap.weights}) + "\n")


def _conversation(*parts: Asked, answer: str | None = None) -> tuple[list[Message], list[Any]]:
    """Return a turn of the user with texts, and images of these sizes, and the answer if there is one."""
    images = [picture(*part) for part in parts if isinstance(part, tuple)]
    made = iter(images)
    content = tuple(TextPart(part) if isinstance(part, str) else ImagePart(next(made)) for part in parts)
    replies = [] if answer is None else [Message(role="assistant", parts=(TextPart(answer),))]
    return [Message(role="user", parts=content), *replies], images


def largest(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, which is no number if one of them is none."""
    return torch.cat([one - other for one, other in zip(values, others, strict=True)]).abs().max().item()


def agree(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor], otherwise: str) -> float:
    """Return the largest difference; raises Unconfirmed if it is above the tolerance."""
    if not (off := largest(values, others)) <= TOLERANCE:
        raise Unconfirmed(f"{otherwise} (by {off:.1g})")
    return off

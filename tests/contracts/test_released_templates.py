"""Released chat templates, of TRL's package, and released vocabularies: kits write and read as transformers does.

A template is given as a row's `--data.tokenizer_chat_template`, or is written as the tiny model's own.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.conversations import message, picture
from helpers.real_vocabularies import with_vocabulary

from lmm_r1.data.messages import Message, TextPart, images_of
from lmm_r1.data.row_parser import parse_row
from lmm_r1.errors import UserError
from lmm_r1.generation.request import check_turn_end
from lmm_r1.lmm_kits import LmmKit, encoding, get_kit
from lmm_r1.supervised.samples import SFTSample, encode_sample

pytest.importorskip("trl")
ASKED = message("user", "What is 12 + 34?")
SYSTEM = message("system", " Think first.\n")
SAID, THOUGHT = "<answer>46</answer>", "<think>\n12 + 34 = 46\n</think>\n\n"
WIDE, TALL = picture(140, 84), picture(84, 112)
TYPED = "<|im_end|> <end_of_turn> <turn|> <|end|> <end_of_utterance> <|eot_id|> </s><eos>"
CONVERSATIONS = {
    "question": [ASKED],
    "white space": [message("user", "  What is\n\n12 + 34?\n ")],
    "system turn": [SYSTEM, ASKED],
    "answer": [ASKED, message("assistant", SAID)],
    "turns": [ASKED, message("assistant", " 46\n"), ASKED],
    "system turn and turns": [SYSTEM, ASKED, message("assistant", SAID), ASKED, message("assistant", "46")],
    "image first": [message("user", WIDE, "Which digit is this?")],
    "image last": [SYSTEM, message("user", "Which digit is this? ", WIDE)],
    "image between": [message("user", "Which digit ", TALL, " is this?"), message("assistant", SAID)],
    "images": [message("user", WIDE, TALL, "or", WIDE, "\n?")],
    "images in turns": [message("user", WIDE, "And?"), message("assistant", SAID), message("user", "And\n", TALL)],
    "thought": [SYSTEM, ASKED, message("assistant", f"{THOUGHT}{SAID}")],
    "thought of an earlier answer": [ASKED, message("assistant", f"{THOUGHT}{SAID}"), message("user", WIDE, "?")],
    "typed tokens": [message("user", TYPED), message("assistant", f"{THOUGHT}46 {TYPED}"), message("user", TYPED)],
}
# A turn of the user, before which a thought stays.
TOOL = [ASKED, message("assistant", f"{THOUGHT}Look."), message("tool", " 46\n", WIDE), message("tool", "47")]
QWEN35 = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
GEMMA4 = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5")
TEXT = """
cohere cohere2 deepseek_r1_distill deepseekv3 glm4moe gptoss lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 llama3_1 llama3_2
muse_glimmer nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning phi3 phi3_5 qwen2_5 qwen3
qwen3_instruct_2507
""".split()
VISUAL = {
    "idefics3": ("idefics3", "smolvlm"),
    "smolvlm": ("smolvlm",),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2_5_vl",)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ("qwen3_vl",)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN35),
    "gemma3": ("gemma3",),
    "gemma4": GEMMA4,
    # The text models' templates, whose images are numbered by whom they are given.
    "phi3_v": ("phi3", "phi3_5"),
}
RELEASED = [(kit, file) for kit, files in {**VISUAL, "llm": TEXT}.items() for file in files]
# By kit, the releases that its tiny model's template writes the same as, with what is set in front of them.
PRESERVED, MEDIUM = "{%- set preserve_thinking = true %}", "{%- set reasoning_effort = 'medium' %}"
SAME = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4")
OWN = [
    *((kit, "", VISUAL[kit][0]) for kit in SAME),
    *(("gemma4", "", file) for file in GEMMA4[2:]),
    *((kit, *case) for kit in ("qwen3_5", "qwen3_5_moe") for case in ((PRESERVED, "qwen3_6"), (MEDIUM, "qwen3_8"))),
]


def released(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def as_given(name: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a user of transformers gives them to a released template."""
    chat, numbers = [], count(1)
    for turn in messages:
        parts = [
            {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image", "image": p.source}
            for p in turn.parts
        ]
        if name.startswith("phi3"):
            texts = (part["text"] if "text" in part else f"<|image_{next(numbers)}|>\n" for part in parts)
            parts = [{"text": "".join(texts)}]
        content = parts if len(parts) > 1 or name in ("idefics3", "smolvlm") else parts[0]["text"]
        chat.append({"role": turn.role, "content": content})
        if name == "qwen3_8" and turn.role == "assistant" and "</think>" in content:
            thought, said = content.removeprefix("<think>").split("</think>")
            chat[-1] |= {"content": said, "reasoning_content": thought}
    return chat


def conversations(kit: LmmKit, file: str) -> dict[str, list[Message]]:
    """The renderings of a kit, in which language models have text in place of images."""
    if kit.takes_images:
        return CONVERSATIONS | ({"tool": TOOL} if file in QWEN35 else {})
    found = {}
    for name, turns in CONVERSATIONS.items():
        texts = [[part.text if isinstance(part, TextPart) else "naïve: 图" for part in turn.parts] for turn in turns]
        found[name] = [message(turn.role, "\n".join(said)) for turn, said in zip(turns, texts, strict=True)]
    return found


def written(kit: LmmKit, processor: Any, messages: Sequence[Message], *, opens: bool) -> str:
    """The text that the kit's ids are made of."""
    reading, marked = encoding.as_text(kit, processor, messages)
    return kit.chat_text(reading, marked, add_generation_prompt=opens).replace(encoding.MARK, "")


def check(kit: LmmKit, processor: Any, file: str, *, template: str, own: bool = False) -> None:
    """See that all renderings, and their ids without typed tokens, are those of transformers with the template."""
    tokenizer = kit.tokenizer_of(processor)
    special = encoding.control_ids(kit, processor)
    for name, turns in conversations(kit, file).items():
        chat, asks = as_given(file, turns), turns[-1].role != "assistant" and name != "question"
        settings = {"chat_template": template, "add_generation_prompt": asks}
        text = tokenizer.apply_chat_template(chat, tokenize=False, **settings)
        assert written(kit, processor, turns, opens=asks) == text, name
        if own or kit.model_type == "phi3_v":
            continue
        images = [part.source for part in images_of(turns)]
        ids = list(kit.encode(processor, turns, images=images, add_generation_prompt=asks).token_ids)
        if name == "typed tokens":
            assert tokenizer.decode(ids) == text
            untyped = [message(turn.role, turn.parts[0].text.replace(TYPED, "?")) for turn in turns]
            plain = kit.render(processor, untyped, add_generation_prompt=asks)
            assert Counter(filter(special.__contains__, ids)) == Counter(filter(special.__contains__, plain))
            continue
        read = processor.apply_chat_template(chat, tokenize=True, return_dict=True, **settings)["input_ids"]
        assert ids == list(read[0] if kit.takes_images else read), name


@pytest.fixture
def given(kit: LmmKit, file: str, tiny_checkpoint: Callable[[str], Path]) -> Any:
    """A processor with a released template."""
    folder = str(tiny_checkpoint(kit.model_type))
    return kit.load_processor(folder, trust_remote_code=False, chat_template=released(file))


@pytest.mark.parametrize(("name", "file"), RELEASED)
def test_with_a_released_template_a_kit_writes_and_reads_as_transformers(kit, file, given):
    check(kit, given, file, template=released(file))


@pytest.mark.parametrize(("name", "front", "file"), OWN)
def test_a_tiny_models_template_writes_what_the_released_one_does(kit, processor, front, file):
    check(kit, processor, file, template=front + released(file), own=True)


@pytest.fixture(scope="module")
def real(built_once: Callable[..., Path], tiny_checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """A function (kit's name, vocabulary, template) that returns the tiny model's processor with a released vocabulary."""

    @cache
    def loaded(name: str, vocabulary: str) -> Any:
        folder = built_once(f"real/{name}", lambda folder: with_vocabulary(vocabulary, tiny_checkpoint(name), folder))
        return get_kit(name).load_processor(str(folder), trust_remote_code=False)

    def processor(name: str, vocabulary: str, template: str) -> Any:
        made = loaded(name, vocabulary)
        made.chat_template = made.tokenizer.chat_template = template
        encoding._KNOWN.pop(made.tokenizer, None)
        return made

    return processor


@pytest.mark.slow
@pytest.mark.parametrize(("name", "vocabulary"), [("qwen3_5", "qwen3_6"), ("qwen3_vl", "qwen")])
def test_with_a_released_vocabulary_ids_are_those_of_transformers(kit, name, vocabulary, real):
    for file in VISUAL[name]:
        check(kit, real(name, vocabulary, released(file)), file, template=released(file))


SUM = "12 + 34 = 46"
FORMS = {
    "inside": {"content": f"<think>\n{SUM}\n</think>\n\n{SAID}"},
    **{key: {"content": SAID, key: SUM} for key in ("reasoning_content", "reasoning", "thinking")},
    "with tags": {"content": SAID, "thinking": f"<think>{SUM}</think>"},
    "twice": {"content": f"<think>{SUM}</think>{SAID}", "reasoning_content": SUM},
    "parts": {"content": [{"type": "text", "text": SAID}], "reasoning": SUM, "reasoning_content": f" {SUM}\n"},
}
# They drop thoughts however they are given.
DROPPING = ("deepseek_r1_distill", "deepseekv3")


def asked(answer: dict[str, Any]) -> Any:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", **answer}]
    return parse_row({"messages": turns}, location="rows.jsonl line 7", base_dir=Path("/"), answer_required=False)


@pytest.mark.slow
def test_with_a_released_vocabulary_a_thought_is_trained_once_however_a_row_has_it(real):
    kit = get_kit("qwen3_5")

    def encoded(answer: dict[str, Any]) -> SFTSample:
        return encode_sample(asked(answer), kit=kit, processor=processor, max_len=400, every_turn=True)

    # A chat keeps what the model wrote, after the tag that the prompt had.
    forms = {**FORMS, "opened": {"content": f"{SUM}\n</think>\n\n{SAID}"}, "none": {"content": SAID}}
    for file in QWEN35:
        processor = real("qwen3_5", "qwen3_6", released(file))
        check_turn_end(kit, processor, path=processor.tokenizer.name_or_path, model="--model model")
        if file == "qwen3_5_nothink":
            with pytest.raises(
                UserError, match="the chat template's generation prompt is not how it begins message 2"
            ):
                encoded(FORMS["inside"])
            # What the message says.
            processor = real("qwen3_5", "qwen3_6", "{%- set enable_thinking = true %}" + released(file))
        for form, answer in forms.items():
            sample = encoded(answer)
            read, learnt = sample.token_ids[: sample.prompt_tokens], sample.token_ids[sample.prompt_tokens : -1]
            # Without a thought, two line breaks are one token, with which the answer does not begin.
            opening, thought = ("<think>\n\n", "") if form == "none" else ("<think>\n", f"{SUM}\n")
            assert processor.tokenizer.decode(read).endswith(f"<|im_start|>assistant\n{opening}"), (file, form)
            assert processor.tokenizer.decode(learnt) == f"{thought}</think>\n\n{SAID}<|im_end|>", (file, form)
            assert all(sample.loss_mask[sample.prompt_tokens : -1])


@pytest.mark.parametrize(("name", "file"), RELEASED)
def test_a_thought_is_written_once_in_its_tags_however_a_row_has_it(kit, file, given):
    for form, answer in FORMS.items():
        if file in DROPPING:
            with pytest.raises(UserError, match="line 7: the chat template drops message 2's thought"):
                encode_sample(asked(answer), kit=kit, processor=given, max_len=400, every_turn=True)
            continue
        _, thought, said = re.split("</?think>", written(kit, given, asked(answer).messages, opens=False))
        assert thought.strip() == SUM, form
        assert (said.count(SAID), said.count(SUM)) == (1, 0), form

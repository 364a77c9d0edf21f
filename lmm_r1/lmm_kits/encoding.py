"""What kits share in turning messages into ids and media: processors, chats, placeholders, pixel bounds, video frames.

Text stays text: rows, users, tools and policies may spell special tokens, which must not become such tokens. A mark is
inserted after the first character of each such spelling. A copy of the tokenizer removes marks, but only after it has
searched for special tokens. The rest is tokenized as if the tokenizer had no special tokens.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import jinja2
from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Part, TextPart, ThinkingMessage, VideoPart, merged_texts, to_chat
from lmm_r1.errors import UserError
from remote_rm.responses import TAGS

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from lmm_r1.data.images import Video
    from lmm_r1.lmm_kits.kit import LmmKit, Processor


FRAMES_PER_STEP = 2
"""Frames that a processor which takes frames in pairs joins into one step of time."""


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the attended tokens of each row from 0; (B, T) from a (B, T) mask, any padding side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def ids_beyond_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a padded vocabulary that the tokenizer does not know."""
    return tuple(range(len(tokenizer), config.get_text_config().vocab_size))


def known_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> set[int]:
    """Return the ids of the texts that are tokens of the tokenizer."""
    ids = (tokenizer.convert_tokens_to_ids(text) for text in texts)
    return {token for token in ids if token is not None and token != tokenizer.unk_token_id}


def collapse_runs(token_ids: Sequence[int], *, placeholders: frozenset[int]) -> list[int]:
    """Keep one of every run of equal placeholders: [1, 9, 9, 9, 2] -> [1, 9, 2] for placeholder 9."""
    return [
        token
        for index, token in enumerate(token_ids)
        if token not in placeholders or index == 0 or token_ids[index - 1] != token
    ]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest one first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, *, text: str) -> bool:
    """Return whether the tokenizer must add its start token to a rendered chat, because the template did not write it."""
    return tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def part_lists(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the turns for a chat template with every content as a list of parts, for templates that skip strings."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in map(dict, to_chat(messages))
    ]


def joined_texts(messages: Sequence[Message], *, separator: str, role: str | None = None) -> list[Mapping[str, Any]]:
    """Return the turns for a chat template, with text parts joined into one string; turns with media stay as they are.

    Args:
        role: whose texts are joined; everybody's by default.
    """

    def joined(turn: Mapping[str, Any]) -> Mapping[str, Any]:
        content = turn["content"]
        if isinstance(content, str) or any(part["type"] != "text" for part in content):
            return turn
        return {**turn, "content": separator.join(part["text"] for part in content)}

    return [joined(turn) if role in (None, turn["role"]) else turn for turn in to_chat(messages)]


def check_typed_media(messages: Sequence[Message], *, media_texts: re.Pattern[str]) -> None:
    """Raise UserError if a text holds a media token, which would refer to an image that does not exist."""
    texts = (part.text for message in messages for part in message.parts if isinstance(part, TextPart))
    if typed := next(filter(None, map(media_texts.search, texts)), None):
        raise UserError(f"the text of a message holds the media token {typed[0]}; take it out of the row")


def check_placeholders(written: int, *, given: int, kind: str) -> None:
    """Raise UserError unless a rendered chat has one placeholder per image, or per video as `kind` says."""
    if written != given:
        raise UserError(
            f"the checkpoint's chat template writes {written} placeholders for the {given} {kind} of a row"
        )


def check_image_marks(text: str, *, mark: str, media_tokens: Sequence[str], given: int) -> None:
    """Raise UserError unless a text with the chat template's marks has one mark per image.

    Args:
        mark: what the template writes for an image.
        media_tokens: tokens that may appear only inside a mark.
    """
    written, rest = text.count(mark), text.replace(mark, "")
    if typed := next((token for token in media_tokens if token in rest), None):
        raise UserError(
            f"the text holds the media token {typed} where none belongs; this model's mark of an image is {mark}"
        )
    if written != given:
        raise UserError(f"the text holds {written} marks {mark} for {given} images; write one for each")


def check_chat(processor: Any, *, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise UserError if a checkpoint has no vocabulary or no usable chat template.

    Transformers reports neither: it makes an empty tokenizer, and it reads a template only when the template is used.
    """
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{path}: no tokenizer in this checkpoint; copy the original model's tokenizer files into it")
    if processor.chat_template is None:
        raise UserError(
            f"{path}: no chat template in this checkpoint; copy the original model's chat_template.jinja (or the "
            "tokenizer_config.json or chat_template.json that holds it) into it"
        )
    try:
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except Exception as error:  # templates raise what they like
        raise UserError(f"{path}: the chat template of this checkpoint is broken ({error}); correct it") from error


def check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str], *, path: str) -> None:
    """Raise UserError if the checkpoint's tokenizer lacks one of the tokens."""
    lacking = set(tokens) - tokenizer.get_vocab().keys()
    if lacking:
        raise UserError(
            f"{path}: the tokenizer of this checkpoint has no {' and no '.join(sorted(lacking))}; copy the original "
            "model's tokenizer files into it"
        )


@contextmanager
def placed(location: str) -> Iterator[None]:
    """Prefix what a kit or a chat template refuses with the location of the row."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(
            f"{location}: the checkpoint's chat template refuses the conversation ({error}); write the turns as the template "
            "takes them, or take the row out"
        ) from error
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def load_image_processor(
    path: str, *, processor_classes: tuple[type[ProcessorMixin], ...], chat_template: str | None = None
) -> Any:
    """Load the processor of a model with images; raises UserError if a part of it or the chat template is missing.

    Args:
        processor_classes: the classes of which it must be one.
        chat_template: replaces the checkpoint's own.
    """
    from transformers import AutoProcessor

    # Either file can hold the image processor's settings; transformers 5 writes the first.
    names = ("processor_config.json", "preprocessor_config.json")
    wanted = f"copy {' or '.join(names)}, the tokenizer files and the chat template of the original model into it"
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise UserError(f"{path}: no image processor in this checkpoint; {wanted}")
    try:
        processor = AutoProcessor.from_pretrained(path)
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: the image processor or the tokenizer of this checkpoint cannot be loaded ({error}); {wanted}"
        ) from error
    if not isinstance(processor, processor_classes):
        raise UserError(f"{path}: this checkpoint has a tokenizer but no image processor; {wanted}")
    if chat_template is not None:
        processor.chat_template = processor.tokenizer.chat_template = chat_template
    # Some processor classes do not load a chat template; the tokenizer reads its own from the same file.
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    check_chat(processor, tokenizer=processor.tokenizer, path=path)
    return processor


def bounded_size(*, height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width) as multiples of `factor` with an area inside the bounds and nearly the same aspect ratio.

    The area takes precedence over the aspect ratio, and the upper bound over the lower; no side is shorter than `factor`.
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(max_pixels / (height * width))
        rows, columns = (max(factor, math.floor(side * scale / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    # If one side has its minimum, or both were rounded up, shorten the longer one.
    if rows * columns > max_pixels:
        shorter = min(rows, columns)
        longer = max(factor, max_pixels // shorter // factor * factor)
        rows, columns = (longer, shorter) if rows > columns else (shorter, longer)
    return rows, columns


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return an image of this width and height, which both training and rollouts get; the same image if it has them."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def bounded_image_size(
    part: ImagePart | VideoPart, *, width: int, height: int, limits: tuple[int, int], factor: int = 1
) -> tuple[int, int]:
    """Return the width and height of an image of this size within its part's pixel bounds, as far as `limits` allow.

    Args:
        limits: the fewest and the most pixels that the processor scales an image to.
        factor: sides become multiples of it.
    """
    if part.min_pixels is None and part.max_pixels is None:
        return width, height
    lowest, highest = limits
    highest = min(highest, part.max_pixels or highest)
    lowest = min(max(lowest, part.min_pixels or lowest), highest)
    rows, columns = bounded_size(height=height, width=width, factor=factor, min_pixels=lowest, max_pixels=highest)
    return columns, rows


def bounded_video(processor: ProcessorMixin, video: Video, part: VideoPart, *, frames_together: int = 1) -> Video:
    """Resize a video's frames to its part's pixel bounds, as far as the processor's own bounds allow.

    Args:
        frames_together: how many frames share the pixels that the processor's bounds limit.
    """
    import numpy as np

    if part.min_pixels is None and part.max_pixels is None:
        return video
    video_processor = processor.video_processor
    lowest = -(-video_processor.size["shortest_edge"] // frames_together)
    highest = max(lowest, video_processor.size["longest_edge"] // frames_together)
    upper = min(max(lowest, part.max_pixels or highest), highest)
    height, width = bounded_size(
        height=video.frames.shape[1],
        width=video.frames.shape[2],
        factor=video_processor.patch_size * video_processor.merge_size,
        min_pixels=min(max(lowest, part.min_pixels or lowest), upper),
        max_pixels=upper,
    )
    frames = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)) for frame in video.frames
    ]
    return replace(video, frames=np.stack(frames))


def bounded_steps(processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
    """Resize a video to its part's pixel bounds, for a processor that takes frames in pairs and bounds all of them together.

    Such a processor refuses a single frame, so a single frame is repeated.
    """
    import numpy as np

    if len(video.frames) < FRAMES_PER_STEP:
        video = replace(video, frames=np.repeat(video.frames, FRAMES_PER_STEP, axis=0))
    # The processor rounds the number of frames to whole steps.
    frames_together = round(len(video.frames) / FRAMES_PER_STEP) * FRAMES_PER_STEP
    return bounded_video(processor, video, part, frames_together=frames_together)


def channels_first(video: Video) -> np.ndarray:
    """Return frames (N, 3, H, W), because processors mistake frames (N, H, W, 3) of height 1 or 3 for that layout."""
    import numpy as np

    return np.ascontiguousarray(video.frames.transpose(0, 3, 1, 2))


def video_metadata(video: Video) -> dict[str, object]:
    """Return the metadata by which a processor takes all frames as they are."""
    import numpy as np

    number = len(video.frames)
    return {
        "fps": video.fps,
        "total_num_frames": number,
        "duration": number / video.fps,
        # An array, because a processor appends to a list.
        "frames_indices": np.arange(number),
    }


def images_refused(sizes: Iterable[tuple[int, int]], error: ValueError) -> UserError:
    """Return the error for a row whose images or videos, given by width and height, a processor refuses."""
    listed = ", ".join(f"{width}x{height}" for width, height in sizes)
    return UserError(f"the processor refuses the images or videos ({listed}): {error}; take the row out")


# From Unicode's private use area. A text that holds this mark itself is marked again inside it.
MARK = "\ue000lmm-r1\ue001"
# A special token of the copy, which marks the beginning and the end of a text.
BORDER = "\ue000lmm-r1 border\ue001"
_PROBE = "lmm-r1"
_OPENED = re.compile(rf"({BORDER})(<think>\s*)(?=.*</think>)", re.DOTALL)
_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)", re.DOTALL)


@dataclass(kw_only=True)
class _Known:
    """Cached results for a tokenizer."""

    control: re.Pattern[str]
    control_ids: frozenset[int]
    takes_system: bool
    """Whether its chat template writes system turns."""
    thoughts: Literal["kept", "rewritten", "apart", "dropped"]
    """What its chat template does with a thought in an answer's text; `apart`: it writes only those that it gets apart."""
    copied: Processor | None = None
    """A copy of its processor whose tokenizer removes marks, made when it is first needed."""


_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def control_texts(kit: LmmKit, processor: Processor) -> re.Pattern[str]:
    """Return a pattern of texts that only the chat template may write: special tokens, media marks and tokens of turns.

    Special tokens are those that the tokenizer flags as special. Tokens of turns are those that the template writes next to
    a message, flagged or not. Tokens that a model writes as words of its answers are not included.
    """
    return _known(kit, processor).control


def as_text(kit: LmmKit, processor: Processor, messages: Sequence[Message]) -> tuple[Processor, Sequence[Message]]:
    """Return a processor and messages with which the texts stay text: the arguments, or a copy and marked messages.

    Raises UserError if the tokenizer cannot read such text.
    """
    control = control_texts(kit, processor)
    messages = with_system_placed(kit, processor, messages)
    marked = [_marked_message(message, control) for message in messages]
    unmarked = all(one is other for one, other in zip(marked, messages, strict=True))
    return processor if unmarked else _copied(kit, processor), with_thoughts_apart(kit, processor, marked)


def as_plain_prompt(kit: LmmKit, processor: Processor, message: Message) -> tuple[Processor, str]:
    """Return the processor for a prompt without the chat template, and the prompt's text.

    The prompt template of a run keeps its special tokens, and so does a text without a template. A row's text in a template
    stays text. Raises UserError as `as_text` does.
    """
    control = control_texts(kit, processor)
    parts = [part for part in message.parts if isinstance(part, TextPart)]
    text, marked = "".join(part.text for part in parts), "".join(_filled(part, control) for part in parts)
    return (processor, text) if marked == text else (_copied(kit, processor), marked)


def _filled(part: TextPart, control: re.Pattern[str]) -> str:
    """Return a plain prompt with marks in the row's own text."""
    if part.template == "{}":
        return part.text
    around = part.template.split("{}")
    length = (len(part.text) - sum(map(len, around))) // (len(around) - 1)
    own = part.text[len(around[0]) : len(around[0]) + length]
    return part.template.replace("{}", _marked(own, control))


def as_bordered_text(
    kit: LmmKit, processor: Processor, messages: Sequence[Message]
) -> tuple[Processor, Sequence[Message], int]:
    """Return a processor and messages with a border before and after each text next to media, and the border's id.

    Only the model's turns have borders.
    """
    control, own = control_texts(kit, processor), _copied(kit, processor)
    messages = with_system_placed(kit, processor, messages)
    kept = _known(kit, processor).thoughts == "kept"
    bordered = [_bordered(_marked_message(message, control), keeps_thoughts=kept) for message in messages]
    return own, [*with_thoughts_apart(kit, processor, bordered)], kit.tokenizer_of(own).convert_tokens_to_ids(BORDER)


def with_system_placed(kit: LmmKit, processor: Processor, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages whose system turn opens the user's first turn if the chat template refuses or drops such turns."""
    if [message.role for message in messages[:2]] != ["system", "user"] or _known(kit, processor).takes_system:
        return messages
    system, user, *others = messages
    return [replace(user, parts=merged_texts((*system.parts, TextPart("\n\n"), *user.parts))), *others]


def with_thoughts_apart(kit: LmmKit, processor: Processor, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with the thoughts that open the model's turns apart, if the chat template wants them so."""
    if not any(map(_thought_of, messages)) or _known(kit, processor).thoughts != "apart":
        return messages
    return list(map(_apart, messages))


def drops_thought(kit: LmmKit, processor: Processor, message: Message) -> bool:
    """Return whether a turn of the model has a thought that the chat template does not write."""
    return _thought_of(message) is not None and _known(kit, processor).thoughts == "dropped"


def _thought_of(message: Message) -> re.Match[str] | None:
    first = message.parts[0] if message.role == "assistant" and message.parts else None
    return _THOUGHT.fullmatch(first.text) if isinstance(first, TextPart) else None


def _apart(message: Message) -> Message:
    if (found := _thought_of(message)) is None:
        return message
    return ThinkingMessage(role="assistant", thought=found[1], parts=(TextPart(found[2]), *message.parts[1:]))


def control_ids(kit: LmmKit, processor: Processor) -> frozenset[int]:
    """Return the ids of the tokens that `control_texts` matches, which text never produces."""
    return _known(kit, processor).control_ids


def text_ids(kit: LmmKit, processor: Processor, text: str) -> list[int]:
    """Return the ids of a text without control tokens; raises UserError as `as_text` does."""
    marked = _marked(text, control_texts(kit, processor))
    reading = processor if marked == text else _copied(kit, processor)
    return kit.tokenizer_of(reading)(marked, add_special_tokens=False)["input_ids"]


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message; a template may join adjacent parts, so they are joined here."""
    for is_text, parts in groupby(message.parts, key=lambda part: isinstance(part, TextPart)):
        if is_text:
            yield "".join(part.text.strip() for part in parts if isinstance(part, TextPart))


def _marked_message(message: Message, control: re.Pattern[str]) -> Message:
    """Return a message with marks in its texts, or the same message if they spell no special tokens."""
    if not any(map(control.search, _texts(message))):
        return message
    parts: list[Part] = []
    after_text = False
    for part in message.parts:
        if isinstance(part, TextPart):
            text = _marked(part.text, control)
            # Two adjacent parts can spell a token together, also if a template strips spaces between them.
            start = len(text) - len(text.lstrip())
            parts.append(TextPart(f"{text[:start]}{MARK}{text[start:]}" if after_text and text.strip() else text))
        else:
            parts.append(part)
        after_text = isinstance(part, TextPart)
    return replace(message, parts=tuple(parts))


def _marked(text: str, control: re.Pattern[str]) -> str:
    pieces, start = [], 0
    while found := control.search(text, start):
        pieces.append(text[start : found.start() + 1])
        start = found.start() + 1
    return MARK.join([*pieces, text[start:]])


def _bordered(message: Message, *, keeps_thoughts: bool) -> Message:
    """Return a model's turn with borders at its texts if it also has images or videos; other messages stay as they are."""
    if message.role != "assistant" or all(isinstance(part, TextPart) for part in message.parts):
        return message
    parts = [_with_borders(part) if isinstance(part, TextPart) else part for part in message.parts]
    if isinstance(parts[0], TextPart) and not keeps_thoughts:
        # The template writes the tag itself.
        parts[0] = TextPart(_OPENED.sub(r"\2\1", parts[0].text))
    return replace(message, parts=tuple(parts))


def _with_borders(part: TextPart) -> TextPart:
    """Return a text with a border at each end; spaces outside the borders stay, so that a template can strip them."""
    inner = part.text.strip()
    return TextPart(part.text.replace(inner, f"{BORDER}{inner}{BORDER}", 1)) if inner else part


def _known(kit: LmmKit, processor: Processor) -> _Known:
    tokenizer = kit.tokenizer_of(processor)
    if tokenizer not in _KNOWN:
        turns, takes_system = _turn_tokens(kit, processor)
        control = _control(kit, processor, turns)
        added = tokenizer.added_tokens_decoder.items()
        ids = frozenset(number for number, token in added if control.fullmatch(token.content))
        thoughts = _way_of_thoughts(kit, processor)
        _KNOWN[tokenizer] = _Known(control=control, control_ids=ids, takes_system=takes_system, thoughts=thoughts)
    return _KNOWN[tokenizer]


def _control(kit: LmmKit, processor: Processor, turns: set[str]) -> re.Pattern[str]:
    tokenizer = kit.tokenizer_of(processor)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens, *turns}
    # Words of the model's answers, even if the tokenizer flags them.
    special -= {*TAGS, *kit.spoken_tokens, *tokenizer.convert_ids_to_tokens(sorted(kit.spoken_end_ids(tokenizer)))}
    # A mark does not fit inside a single character.
    texts = any_of({MARK, BORDER, *(text for text in special if len(text) > 1)})
    return re.compile(f"{texts.pattern}|{kit.media_texts(processor).pattern}")


def _turn_tokens(kit: LmmKit, processor: Processor) -> tuple[set[str], bool]:
    """Return the tokens that the chat template writes next to a message or at the start of a generated turn.

    Not all tokenizers flag them as special. The second value is whether it writes a system turn.
    """
    added = [token.content for token in kit.tokenizer_of(processor).added_tokens_decoder.values()]
    token = any_of(text for text in added if text.strip())
    at_end, at_start = re.compile(rf"({token.pattern})\s*\Z"), re.compile(rf"\s*({token.pattern})")
    found, written = set(), ""
    for asked in ([_said("user", _PROBE)], [_said("system", _PROBE), _said("user", "?")]):
        try:
            closed, opened = (kit.chat_text(processor, asked, add_generation_prompt=opens) for opens in (False, True))
        except (UserError, jinja2.TemplateError):
            # The template refuses system turns.
            written = ""
            continue
        written = closed
        before, _, after = closed.partition(_PROBE)
        places = (at_end.search(before), at_start.match(after), at_start.match(opened.removeprefix(closed)))
        found |= {place[1] for place in places if place is not None}
    return found, _PROBE in written


def _way_of_thoughts(kit: LmmKit, processor: Processor) -> Literal["kept", "rewritten", "apart", "dropped"]:
    thought, written = f"<think>{_PROBE}</think>12", re.compile(rf"<think>\s*{_PROBE}\s*</think>\s*12")
    texts = []
    for said in (_said("assistant", thought), _apart(_said("assistant", thought))):
        try:
            texts.append(kit.chat_text(processor, [_said("user", "?"), said], add_generation_prompt=False))
        except (UserError, jinja2.TemplateError):
            texts.append("")
    inside, apart = (text.count("<think>") == 1 and written.search(text) is not None for text in texts)
    if apart and not inside:
        return "apart"
    if texts[0] and _PROBE not in texts[0]:
        return "dropped"
    return "rewritten" if inside and thought not in texts[0] else "kept"


def _said(role: str, text: str) -> Message:
    return Message(role=role, parts=(TextPart(text),))


def _copied(kit: LmmKit, processor: Processor) -> Processor:
    """Return a copy of the processor whose tokenizer removes marks, made once: a large vocabulary takes seconds."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    known = _known(kit, processor)
    if known.copied is not None:
        return known.copied
    if not kit.tokenizer_of(processor).is_fast:
        raise UserError(
            "a text spells a special token of this checkpoint, whose tokenizer has no fast form and cannot read that as text; "
            "take it out of the text"
        )
    known.copied = copy.deepcopy(processor)
    tokenizer = kit.tokenizer_of(known.copied)
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    if any(token.normalized and known.control.fullmatch(token.content) for token in added):
        # The tokenizer also searches for such tokens after the normalization.
        splits = [pre_tokenizers.Split(MARK, behavior="removed"), *_given(backend.pre_tokenizer)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Replace(MARK, ""), *_given(backend.normalizer)])
    tokenizer.add_tokens([AddedToken(BORDER, special=True, normalized=False)], special_tokens=True)
    return known.copied


def _given(step: Any) -> list[Any]:
    return [] if step is None else [step]

"""Videos of every kit that takes them, against Hugging Face's own processor and model, and against vLLM."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conversations import clip, message, picture, row
from helpers.engines import disturb, largest_difference, load_weights, running_engine, sampled
from helpers.tiny_models import encode, make_actor, pad

from lmm_r1.data.messages import Message, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.videos import load_video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, EncodedPrompt, LmmKit, get_kit
from lmm_r1.trainer.sft_samples import encode_sample

pytestmark = pytest.mark.contract

VIDEO_KITS = [name for name in KITS if get_kit(name).takes_videos]
LONG_TEXT = "What is 12 + 34? Which digit does the picture show? " * 12
TOLERANCE = 1e-4
STILL = picture(140, 84)
SHORT, TALL, LONG = clip(2, 112, 84), clip(5, 84, 168), clip(12, 64, 64, fps=0.7)
CASES = {
    "one video": [message("user", SHORT, "Which digit is this?")],
    "an odd number of frames": [message("user", "Which digit ", TALL, " is this?")],
    "one frame": [message("user", clip(1, 112, 84), "Which digit?")],
    "more steps than rows": [message("user", LONG, "Which digit is this?")],
    "a video and an image": [message("user", SHORT, "or", STILL, "?")],
    "an image and a video": [message("user", STILL, SHORT)],
    "two videos of different lengths": [message("user", TALL, "or", SHORT, "?")],
    "videos side by side": [message("user", SHORT, TALL)],
    "videos in several turns": [
        message("system", "Think first."),
        message("user", SHORT, STILL, "Which digit?"),
        message("assistant", "<think>easy</think><answer>4</answer>"),
        message("user", "And this one?", TALL),
    ],
}
# Where a video's time reaches further than its rows and columns, what transformers 5.15 works out is not what the models
# were trained with; tests/unit/lmm_kits/test_qwen_positions.py has such videos.
POSITIONED = [case for case in CASES if case != "more steps than rows"]


@pytest.fixture(scope="module", params=VIDEO_KITS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kit(name: str) -> LmmKit:
    return get_kit(name)


@pytest.fixture(scope="module")
def folder(name: str, tiny_checkpoint) -> Path:
    return tiny_checkpoint(name)


@pytest.fixture(scope="module")
def processor(kit: LmmKit, folder: Path) -> Any:
    return kit.load_processor(str(folder), trust_remote_code=False)


@pytest.fixture(scope="module")
def actor(folder: Path) -> Any:
    return make_actor(folder)


def reference(processor: Any, messages: list[Message]) -> dict[str, torch.Tensor]:
    """What Hugging Face's processor makes of the conversation, its frames already sampled."""
    chat = [
        {
            "role": turn.role,
            "content": [
                (
                    {"type": "text", "text": part.text}
                    if isinstance(part, TextPart)
                    else {"type": "video" if isinstance(part, VideoPart) else "image"}
                )
                for part in turn.parts
            ],
        }
        for turn in messages
    ]
    if name_of(processor) in ("Glm4vProcessor", "Glm46VProcessor"):
        # Its template takes a list of parts from the user alone.
        chat = [turn if turn["role"] == "user" else {**turn, "content": turn["content"][0]["text"]} for turn in chat]
    videos = [load_video(part, location="test") for part in videos_of(messages)]
    frames = [video.frames for video in videos]
    if name_of(processor) in ("Qwen3VLProcessor", "Glm4vProcessor", "Glm46VProcessor"):
        # It refuses a lone frame, which the kit shows it twice.
        frames = [np.repeat(each, 2, axis=0) if len(each) == 1 else each for each in frames]
    return dict(
        processor(
            text=[processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)],
            images=[part.source for part in images_of(messages)] or None,
            videos=[list(each) for each in frames],
            video_metadata=[
                {"fps": video.fps, "total_num_frames": len(each), "frames_indices": list(range(len(each)))}
                for video, each in zip(videos, frames, strict=True)
            ],
            do_sample_frames=False,
            return_tensors="pt",
        )
    )


def name_of(thing: Any) -> str:
    return type(thing).__name__


@pytest.mark.parametrize("case", CASES)
def test_ids_and_media_are_the_processors_own(kit, processor, case):
    encoded, expected = encode(kit, processor, CASES[case]), reference(processor, CASES[case])
    assert encoded.token_ids == expected["input_ids"][0].tolist()
    assert set(encoded.media) == set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids"}
    for key, value in encoded.media.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("case", CASES)
def test_the_engine_gets_one_placeholder_per_image_and_video(kit, processor, case):
    messages = CASES[case]
    encoded = encode(kit, processor, messages)
    placeholders = kit.placeholder_ids(processor)
    given = len(images_of(messages)) + len(videos_of(messages))
    assert sum(token in placeholders for token in encoded.engine_token_ids) == given
    assert kit.render(processor, messages, add_generation_prompt=True) == encoded.engine_token_ids
    assert len(encoded.videos) == len(kit.engine_media(encoded)["video"]) == len(videos_of(messages))


# Their stock model refuses images and videos together: the placeholders of both must be as many as the features of either.
APART = ("glm4v", "glm4v_moe")


def stock_inputs(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the stock model takes in the place of a processor's batch of one, its own embeddings and positions."""
    if model.config.model_type not in APART or not {"pixel_values", "pixel_values_videos"} <= given.keys():
        return given
    with pytest.raises(ValueError, match="do not match"):
        model(**given)
    embeds, types = model.get_input_embeddings()(given["input_ids"]), given["mm_token_type_ids"]
    images = model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
    videos = model.get_video_features(given["pixel_values_videos"], given["video_grid_thw"]).pooler_output
    for kind, features in ((1, images), (2, videos)):
        embeds = embeds.masked_scatter((types == kind)[..., None], torch.cat(features))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    positions, _ = model.model.get_rope_index(**{name: given[name] for name in names})
    return {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": given["attention_mask"]}


def positions_seen(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    """Run the model and return the position ids that its language model rotates by."""
    rotary, seen = model.get_submodule("model.language_model.rotary_emb"), []
    hook = rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([*args, *kwargs.values()][1]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs, use_cache=False)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("case", POSITIONED)
def test_positions_are_those_that_the_model_works_out_itself(kit, processor, actor, case):
    encoded = encode(kit, processor, CASES[case])
    with torch.no_grad():
        given = stock_inputs(actor.model, reference(processor, CASES[case]))
    theirs = positions_seen(actor.model, **given)
    sequences, mask = pad([encoded.token_ids], side="right")
    inputs = kit.forward_inputs(actor.model.config, sequences, mask, encoded.media)
    inputs = kit.in_one_tower_run(actor.model.config, {"input_ids": sequences, **inputs})
    assert torch.equal(positions_seen(actor.model, attention_mask=mask, **inputs), theirs)


MIXED = ["a video and an image", "an image and a video", "videos in several turns"]


@pytest.mark.parametrize("case", MIXED)
def test_log_probs_of_images_and_videos_together_are_those_of_the_stock_model(kit, processor, actor, case):
    """Hugging Face's forward runs the vision tower for images, and once more for videos."""
    encoded, theirs = encode(kit, processor, CASES[case]), reference(processor, CASES[case])
    sequences, mask = pad([encoded.token_ids], side="right")
    with torch.no_grad():
        logits = actor.model(**stock_inputs(actor.model, theirs), use_cache=False).logits
        expected = logits[0, :-1].float().log_softmax(dim=-1).gather(1, sequences[0, 1:, None])[:, 0]
        ours = actor(sequences, attention_mask=mask, return_logprobs=True, media=[encoded.media])[0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("cases", [["one video"], MIXED, ["videos side by side", "an image and a video"]])
def test_the_vision_tower_runs_once_in_a_pass(kit, processor, folder, cases, packs):
    """Ranks of ZeRO-3 wait for one another in each of its runs, whatever their rows hold."""
    actor = make_actor(folder, packing_samples=packs)
    prompts = [encode(kit, processor, CASES[case]) for case in cases]
    sequences, mask = pad([prompt.token_ids for prompt in prompts], side="left")
    runs: list[None] = []
    actor.model.model.visual.register_forward_hook(lambda *_: runs.append(None))
    with torch.no_grad():
        actor(sequences, attention_mask=mask, return_logprobs=True, media=[prompt.media for prompt in prompts])
    assert len(runs) == 1


def rows_of(kit: LmmKit, processor: Any) -> list[tuple[list[int], dict | None]]:
    conversations = [
        CASES["a video and an image"],
        [message("user", "What is 12 + 34?")],
        CASES["more steps than rows"],
        [message("user", STILL, "Which digit is this?")],
        CASES["videos in several turns"],
    ]
    encoded = [encode(kit, processor, messages) for messages in conversations]
    return [([*prompt.token_ids, *range(5, 8 + index)], prompt.media) for index, prompt in enumerate(encoded)]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_batch_of_texts_images_and_videos_gives_each_row_its_own_log_probs(kit, processor, actor, side):
    rows = rows_of(kit, processor)
    sequences, mask = pad([ids for ids, _ in rows], side=side)
    with torch.no_grad():
        batch = actor(sequences, attention_mask=mask, return_logprobs=True, media=[media for _, media in rows])
        for index, (ids, media) in enumerate(rows):
            alone = actor(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                return_logprobs=True,
                media=[media],
            )[0]
            first = 0 if side == "right" else sequences.shape[1] - len(ids)
            torch.testing.assert_close(batch[index, first : first + len(ids) - 1], alone, atol=1e-5, rtol=0)


def test_the_order_and_the_times_of_frames_matter(kit, processor, actor):
    def log_probs(part: VideoPart) -> torch.Tensor:
        encoded = encode(kit, processor, [message("user", part, "Which digit?")])
        sequences, mask = pad([encoded.token_ids], side="right")
        with torch.no_grad():
            return actor(sequences, attention_mask=mask, return_logprobs=True, media=[encoded.media])[0, -5:]

    usual = log_probs(TALL)
    assert (log_probs(VideoPart(TALL.source[::-1])) - usual).abs().max() > 1e-3
    slower = log_probs(VideoPart(TALL.source, fps=0.25))
    # The first of these models had no notion of how long a video lasts.
    assert bool((slower - usual).abs().max() > 1e-4) == (kit.model_type != "qwen2_vl")


def test_pixel_bounds_of_a_video_hold_for_each_frame(kit, processor):
    def pixels(**bounds: int) -> tuple[int, EncodedPrompt]:
        part = VideoPart(clip(4, 280, 252).source, **bounds)
        encoded = encode(kit, processor, [message("user", part, "Which digit?")])
        _, height, width = encoded.media["video_grid_thw"][0].tolist()
        return height * width * processor.video_processor.patch_size**2, encoded

    (small, encoded), (large, _) = pixels(max_pixels=20_000), pixels(min_pixels=100_000)
    assert 10_000 < small <= 20_000
    assert 100_000 <= large < 160_000
    (video,) = encoded.videos
    assert video.frames.shape[1] * video.frames.shape[2] == small, "the processor scales the frames once more"


def test_a_video_that_the_processor_refuses_is_a_user_error_with_its_size(kit, processor):
    with pytest.raises(UserError, match="2 frames of 300x1"):
        encode(kit, processor, [message("user", clip(2, 300, 1), "Which digit?")])


def test_prompts_with_videos_survive_pickling(kit, processor):
    encoded = encode(kit, processor, CASES["a video and an image"])
    copy = pickle.loads(pickle.dumps(encoded))
    assert copy.token_ids == encoded.token_ids
    assert np.array_equal(copy.videos[0].frames, encoded.videos[0].frames)
    assert all(torch.equal(copy.media[key], value) for key, value in encoded.media.items())


def test_supervised_training_learns_the_words_around_videos(kit, processor):
    turns = [
        message("user", SHORT, "Which digit?"),
        message("assistant", "<answer>46</answer>"),
        message("user", "And", STILL, TALL, "?"),
        message("assistant", "<answer>47</answer>"),
        message("user", "Sure?"),
        message("assistant", "Yes."),
    ]
    sample = encode_sample(row(*turns), kit=kit, processor=processor, max_len=4096, every_turn=True)
    tokenizer = kit.tokenizer_of(processor)
    trained = [token for token, counts in zip(sample.token_ids, sample.loss_mask, strict=True) if counts]
    end = tokenizer.eos_token
    assert tokenizer.decode(trained) == f"<answer>46</answer>{end}<answer>47</answer>{end}Yes.{end}"


def test_the_engines_log_probs_are_those_of_the_training_forward(kit, processor, folder, tmp_path):
    actor = make_actor(folder, ban_media_tokens=True)
    disturb(actor, seed=0)
    saved = tmp_path / "saved"
    actor.model.save_pretrained(saved)
    kit.save_processor(processor, saved)
    conversations = [
        *CASES.values(),
        [message("user", SHORT, LONG_TEXT)],
        # The same frames, eight times as slow: no cache may take one for the other.
        [message("user", VideoPart(TALL.source, fps=0.25), "Which digit?")],
        [message("user", TALL, "Which digit?")],
        [message("user", "What is 12 + 34?")],
    ]
    prompts = [encode(kit, processor, messages) for messages in conversations]
    differences = []
    with running_engine(kit, saved, max_images=1, max_videos=2) as llm:
        for update in range(2):
            if update:
                disturb(actor, seed=update)
                load_weights(llm, actor, tmp_path / f"update {update}")
            samples = sampled(llm, kit, prompts, banned=actor.banned_token_ids.tolist(), n=2, max_tokens=8)
            differences += [
                largest_difference(actor, [prompt], [group]) for prompt, group in zip(prompts, samples, strict=True)
            ]
    assert max(differences) <= TOLERANCE, differences

"""Videos of every kit that takes them, against Hugging Face's own processor and model, and against vLLM."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conversations import as_written, clip, message, picture, row
from helpers.engines import disturb, largest_difference, load_weights, running_engine, sampled
from helpers.passes import next_log_probs
from helpers.tables import kits_with
from helpers.tiny_models import encode, make_actor, pad, positions_seen
from helpers.video_references import TEXT_KEYS, reference, stock_inputs

from lmm_r1.data.messages import VideoPart, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, get_kit
from lmm_r1.supervised.samples import encode_sample

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
# The first of these models, and these, have no notion of how long a video lasts.
TIMELESS = ("qwen2_vl", "internvl")
# Their processor scales every frame to one size.
ONE_SIZE = ("internvl",)


@pytest.fixture(scope="module", params=kits_with("video"))
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


@pytest.mark.parametrize("case", CASES)
def test_ids_and_media_are_the_processors_own(kit, processor, case):
    encoded, expected = encode(kit, processor, CASES[case]), reference(processor, CASES[case])
    assert encoded.token_ids == expected["input_ids"][0].tolist()
    assert set(encoded.media) == set(expected) - TEXT_KEYS
    for key, value in encoded.media.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("case", CASES)
def test_the_engine_gets_one_placeholder_per_image_and_video(kit, processor, case):
    messages = CASES[case]
    encoded = encode(kit, processor, messages)
    placeholders = kit.placeholder_ids(processor)
    given = len(images_of(messages)) + len(videos_of(messages))
    assert sum(token in placeholders for token in encoded.engine_token_ids) == given
    rendered = kit.render(processor, messages, add_generation_prompt=True)
    assert rendered == encoded.engine_token_ids
    assert len(encoded.videos) == len(kit.engine_media(encoded)["video"]) == len(videos_of(messages))


@pytest.mark.parametrize("case", POSITIONED)
def test_positions_are_those_that_the_model_works_out_itself(kit, processor, actor, case):
    encoded = encode(kit, processor, CASES[case])
    with torch.no_grad():
        given = stock_inputs(actor.model, reference(processor, CASES[case]))
    theirs, _ = positions_seen(actor.model, **given)
    sequences, mask = pad([encoded.token_ids], side="right")
    inputs = kit.forward_inputs(actor.model.config, sequences, mask, encoded.media)
    inputs = kit.in_one_tower_run(actor.model.config, {"input_ids": sequences, **inputs})
    assert torch.equal(positions_seen(actor.model, attention_mask=mask, **inputs)[0], theirs)


MIXED = ["a video and an image", "an image and a video", "videos in several turns"]


@pytest.mark.parametrize("case", MIXED)
def test_log_probs_of_images_and_videos_together_are_those_of_the_stock_model(kit, processor, actor, case):
    """Hugging Face's forward runs the vision tower for images, and once more for videos."""
    encoded, theirs = encode(kit, processor, CASES[case]), reference(processor, CASES[case])
    sequences, mask = pad([encoded.token_ids], side="right")
    with torch.no_grad():
        logits = actor.model(**stock_inputs(actor.model, theirs), use_cache=False).logits
        expected = logits[0, :-1].float().log_softmax(dim=-1).gather(1, sequences[0, 1:, None])[:, 0]
        ours = next_log_probs(actor, sequences, attention_mask=mask, media=[encoded.media])[0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_the_order_and_the_times_of_frames_matter(kit, processor, actor):
    def log_probs(part: VideoPart) -> torch.Tensor:
        encoded = encode(kit, processor, [message("user", part, "Which digit?")])
        sequences, mask = pad([encoded.token_ids], side="right")
        with torch.no_grad():
            return next_log_probs(actor, sequences, attention_mask=mask, media=[encoded.media])[0, -5:]

    usual = log_probs(TALL)
    assert (log_probs(VideoPart(TALL.source[::-1])) - usual).abs().max() > 1e-3
    slower = log_probs(VideoPart(TALL.source, fps=0.25))
    assert bool((slower - usual).abs().max() > 1e-4) == (kit.model_type not in TIMELESS)


def test_pixel_bounds_of_a_video_hold_for_each_frame(kit, processor):
    if kit.model_type in ONE_SIZE:
        bounded = VideoPart(SHORT.source, max_pixels=5000)
        ours, usual = (encode(kit, processor, [message("user", part, "Which digit?")]) for part in (bounded, SHORT))
        assert torch.equal(pixels_of(ours), pixels_of(usual))
        assert np.array_equal(ours.videos[0].frames, usual.videos[0].frames), "the engine gets what the processor does"
        return

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


def pixels_of(encoded: EncodedPrompt) -> torch.Tensor:
    return encoded.media.get("pixel_values_videos", encoded.media.get("pixel_values"))


def test_a_video_that_the_processor_refuses_is_a_user_error_with_its_size(kit, processor):
    if kit.model_type in ONE_SIZE:
        assert encode(kit, processor, [message("user", clip(2, 300, 1), "Which digit?")]).videos
        return
    with pytest.raises(UserError, match="300x1"):
        encode(kit, processor, [message("user", clip(2, 300, 1), "Which digit?")])


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
    written = [as_written(kit.model_type, text) for text in ("<answer>46</answer>", "<answer>47</answer>", "Yes.")]
    assert tokenizer.decode(trained) == "".join(f"{text}{tokenizer.eos_token}" for text in written)


def test_the_engines_log_probs_are_those_of_the_training_forward(kit, processor, folder, tmp_path):
    actor = make_actor(folder, ban_media_tokens=True)
    disturb(actor, seed=0)
    saved = tmp_path / "saved"
    actor.model.save_pretrained(saved)
    processor.save_pretrained(saved)
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

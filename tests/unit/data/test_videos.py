"""Videos written with OpenCV, whose frames are told apart by their grey level."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmm_r1.data.images import DEFAULT_FPS, check_video_exists, frame_indices, load_video
from lmm_r1.data.messages import VideoPart
from lmm_r1.errors import UserError

PLACE = "rows.jsonl line 7"
STEP = 8  # between the grey levels of two frames; a codec moves a level by less


def write_video(path: Path, *, frames: int, fps: float) -> str:
    """Write frames of grey level 0, 8, 16, ..., of which the left half is red."""
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, (64, 48))
    for index in range(frames):
        frame = np.full((48, 64, 3), STEP * index, dtype=np.uint8)
        frame[:, :32] = (0, 0, 200)  # OpenCV's order is blue, green, red
        writer.write(frame)
    writer.release()
    return str(path)


def taken(video) -> list[int]:
    """Which frames of a written video these are."""
    return [round(float(frame[:, 40:].mean()) / STEP) for frame in video.frames]


def test_frames_are_the_first_of_equal_spans():
    # 3 s at 30 frames a second: 6 frames at 2 a second.
    assert frame_indices(total=90, seconds=3.0, fps=2.0, max_frames=32) == [0, 15, 30, 45, 60, 75]
    # 10 frames in 4 s, 1 a second: spans of 2.5 frames.
    assert frame_indices(total=10, seconds=4.0, fps=1.0, max_frames=32) == [0, 2, 5, 7]


def test_at_least_one_frame_at_most_the_limit_and_no_frame_twice():
    assert frame_indices(total=90, seconds=3.0, fps=0.1, max_frames=32) == [0]
    assert frame_indices(total=90, seconds=3.0, fps=2.0, max_frames=4) == [0, 22, 45, 67]
    assert frame_indices(total=3, seconds=3.0, fps=2.0, max_frames=32) == [0, 1, 2]
    assert frame_indices(total=1, seconds=0.04, fps=2.0, max_frames=32) == [0]
    # Half a frame counts.
    assert len(frame_indices(total=90, seconds=1.25, fps=2.0, max_frames=32)) == 3


def test_a_file_is_sampled_at_the_rate_asked_for_and_read_in_rgb(tmp_path):
    path = write_video(tmp_path / "a.avi", frames=20, fps=10)
    video = load_video(VideoPart(path, fps=4.0), location=PLACE)
    # 2 s at 4 frames a second: spans of 2.5 frames.
    assert taken(video) == [0, 2, 5, 7, 10, 12, 15, 17]
    assert video.fps == pytest.approx(4.0)
    assert video.frames.shape == (8, 48, 64, 3)
    assert video.frames.dtype == np.uint8
    red, green, blue = video.frames[0, 24, 8]
    assert red > 150 > 60 > max(green, blue)


def test_a_file_without_settings_gives_the_default_rate_and_a_limit_thins_it_out(tmp_path):
    path = write_video(tmp_path / "a.avi", frames=20, fps=10)
    video = load_video(VideoPart(path), location=PLACE)
    assert (taken(video), video.fps) == ([0, 5, 10, 15], pytest.approx(DEFAULT_FPS))
    video = load_video(VideoPart(path, max_frames=3), location=PLACE)
    # 3 frames in 2 s.
    assert (taken(video), video.fps) == ([0, 6, 13], pytest.approx(1.5))


def test_a_file_that_states_more_frames_than_it_holds_is_sampled_over_those_it_holds(tmp_path):
    data = Path(write_video(tmp_path / "a.avi", frames=20, fps=10)).read_bytes()
    images = data.index(b"movi")
    (tmp_path / "cut.avi").write_bytes(data[: images + (len(data) - images) // 2])
    video = load_video(VideoPart(str(tmp_path / "cut.avi"), fps=10.0), location=PLACE)
    held = len(video.frames)
    assert 5 <= held <= 12
    assert taken(video) == list(range(held))
    assert video.fps == pytest.approx(10.0)


def frame(level: int, size: tuple[int, int] = (4, 2)) -> Image.Image:
    return Image.new("RGB", size, (level, level, level))


def test_a_list_of_frames_is_taken_whole_and_shows_as_many_seconds_as_its_rate_says(tmp_path):
    frame(8).save(tmp_path / "a.png")
    part = VideoPart((str(tmp_path / "a.png"), frame(16), frame(24)), fps=0.5)
    video = load_video(part, location=PLACE)
    assert video.frames[:, 0, 0, 0].tolist() == [8, 16, 24]
    assert video.frames.shape == (3, 2, 4, 3)
    assert video.fps == 0.5
    assert load_video(VideoPart((frame(0),)), location=PLACE).fps == DEFAULT_FPS


def test_frames_of_different_sizes_are_an_error_with_both_sizes():
    part = VideoPart((frame(0), frame(0, (5, 2))))
    with pytest.raises(UserError, match=f"^{PLACE}: the frames of a video differ in size: .* 5x2 .* 4x2"):
        load_video(part, location=PLACE)


@pytest.mark.parametrize("read", [check_video_exists, load_video])
def test_a_missing_or_empty_video_is_an_error_with_its_place(read, tmp_path):
    with pytest.raises(UserError, match=f"^{PLACE}: no video file {tmp_path}/a.mp4"):
        read(VideoPart(str(tmp_path / "a.mp4")), location=PLACE)
    (tmp_path / "a.mp4").touch()
    with pytest.raises(UserError, match=f"^{PLACE}: the video file {tmp_path}/a.mp4 is empty"):
        read(VideoPart(str(tmp_path / "a.mp4")), location=PLACE)
    with pytest.raises(UserError, match=f"^{PLACE}: no image file {tmp_path}/f.png"):
        read(VideoPart((frame(0), str(tmp_path / "f.png"))), location=PLACE)


def test_a_file_that_is_no_video_or_holds_no_frame_is_an_error_with_its_place(tmp_path):
    pytest.importorskip("cv2")
    (tmp_path / "a.mp4").write_text("not a video")
    with pytest.raises(UserError, match=f"^{PLACE}: cannot read the video {tmp_path}/a.mp4: .* drop the row"):
        load_video(VideoPart(str(tmp_path / "a.mp4")), location=PLACE)
    path = write_video(tmp_path / "b.avi", frames=0, fps=10)
    with pytest.raises(UserError, match=f"^{PLACE}: cannot read the video {path}"):
        load_video(VideoPart(path), location=PLACE)

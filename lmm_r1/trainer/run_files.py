"""The files that an RL run's workers open, on whichever node they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmm_r1.cluster.shared_paths import SharedPath
from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.config.reward_source import reward_function
from lmm_r1.data.image_sources import kind_of
from lmm_r1.data.messages import Row, images_of, videos_of

_MODELS = ("actor", "critic", "reward")


def shared_paths(config: PPOConfig, *, rows: Sequence[Row], eval_rows: Sequence[Row]) -> list[SharedPath]:
    """Return the paths that all nodes of a run must see; of images and videos, one in each folder."""
    models = {f"--{name}.model_name_or_path": getattr(config, name).model_name_or_path for name in _MODELS}
    # Others are names of the hub, which each node has in a cache of its own.
    paths = [SharedPath(flag=flag, path=path) for flag, path in models.items() if path and Path(path).exists()]
    function = reward_function(config.reward)
    if function is not None and function.path is not None:
        paths.append(SharedPath(flag="--reward.remote_url", path=function.path))
    if config.train.agent_func_path is not None:
        paths.append(SharedPath(flag="--train.agent_func_path", path=config.train.agent_func_path))
    for flag, some in (("--data.prompt_dataset", rows), ("--eval.dataset", eval_rows)):
        paths += [SharedPath(flag=flag, path=path) for path in _one_per_folder(_files(some))]
    paths.append(SharedPath(flag="--ckpt.output_dir", path=config.ckpt.output_dir, written=True))
    # The weights of a reference that follows the policy are there as well.
    if not config.ckpt.disable_ds or config.ref.refresh_steps:
        paths.append(SharedPath(flag="--ckpt.path", path=str(checkpoint_folder(config)), written=True))
    return paths


def _files(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        sources = [image.source for image in images_of(row.messages)]
        for video in videos_of(row.messages):
            sources += [video.source] if isinstance(video.source, str) else video.source
        yield from (source for source in sources if isinstance(source, str) and kind_of(source) == "path")


def _one_per_folder(files: Iterator[str]) -> list[str]:
    return list({os.path.dirname(file): file for file in files}.values())

"""The student of a distillation in vLLM: each rank has an engine in its own process, whose weights follow the student's."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from lmm_r1 import cpu
from lmm_r1.config import KDConfig
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.generation.backends import check_backend, prepare_process
from lmm_r1.generation.engine import EngineSettings, Outcome, SamplingSettings
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor
from lmm_r1.trainer.sft_evaluation import prompt_of
from lmm_r1.trainer.sft_samples import SFTSample
from lmm_r1.trainer.weight_sync import send_buckets, written_weights

_DTYPES: dict[str, Literal["bfloat16", "float16", "float32"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


def check_sampled(config: KDConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError where the student cannot sample responses in vLLM as the run is launched."""
    share = f"--rollout.on_policy_share {config.rollout.on_policy_share:g}"
    check_backend("vllm", checkpoint.kit, model=f"{share}: {checkpoint.path}", instead="leave it out")
    processes = os.environ.get("WORLD_SIZE", "1")
    if not cpu.has_cuda() and os.environ.get("LOCAL_WORLD_SIZE", processes) != processes:
        raise UserError(
            f"{share}: without CUDA the engines take new weights from files in memory, which other machines do not see; "
            "run on one machine, or sample in rounds with lmm-r1 batch_inference"
        )


class StudentEngine:
    """Samples responses from the student as it is; every rank asks for new weights at the same step.

    It ends with the process: vLLM's shutdown would end the training's group of processes, too.
    """

    def __init__(self, config: KDConfig, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        """Args: rows: all that prompts are taken from."""
        # vLLM reads it when it is imported: its engine gets the tensors themselves.
        prepare_process()
        from lmm_r1.generation.vllm_engine import VllmEngine

        assert config.ds.param_dtype is not None, "filled in by config.resolve"
        rollout, engine = config.rollout, config.vllm
        self.seed = config.train.seed
        self.sampling = SamplingSettings(
            n_samples=1,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_new_tokens,
        )
        settings = EngineSettings(
            adapter=None,
            dtype=_DTYPES[config.ds.param_dtype],
            max_model_len=config.data.max_len,
            max_images=max(len(images_of(row.messages)) for row in rows),
            max_videos=max(len(videos_of(row.messages)) for row in rows),
            batch_rows=config.train.micro_batch_size,
            tensor_parallel_size=1,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            enforce_eager=engine.enforce_eager,
            seed=config.train.seed,
            trust_remote_code=config.train.trust_remote_code,
        )
        self.engine = VllmEngine(checkpoint.path, settings, checkpoint=checkpoint, in_training=True)

    def renew(self, student: KitActor) -> None:
        """Give the engine the student's weights as they are now, and let it forget what it computed with the old ones."""
        if cpu.has_cuda():
            send_buckets(student, self, split=False)
        else:
            with written_weights(student) as folder:
                self.engine.call_workers("load_weights_from", str(folder))
        self.engine.forget(keep_images=not student.trains_vision)

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take whole weights by the checkpoint's names, as a `Channel` does: the engine is in this process."""
        self.engine.call_workers("take_weights", dict(weights))

    def samples(self, rows: Sequence[Row], *, step: int, numbers: Sequence[int]) -> list[SFTSample | None]:
        """Return a response to each row's prompt as a sample; None where the prompt leaves no room for one.

        Args:
            numbers: of the rows; with the step they decide what is drawn, so that a resumed run draws it again.
        """
        found: dict[int, SFTSample] = {}

        async def outcome_of(number: int, row: Row) -> Outcome:
            seed = zlib.crc32(f"{self.seed} {step} {number}".encode())
            try:
                encoded, response = await self.engine.response(row, self.sampling, seed=seed)
            except UserError as error:
                return Outcome(index=number, row=row, reason=str(error))
            prompt = [False] * len(encoded.token_ids)
            found[number] = SFTSample(
                token_ids=[*encoded.token_ids, *response],
                loss_mask=prompt + [True] * len(response),
                media=encoded.media,
            )
            return Outcome(index=number, row=row)

        asked = [(number, prompt_of(row)) for number, row in zip(numbers, rows, strict=True)]
        for _ in self.engine.outcomes(asked, outcome_of, responses_per_row=1):
            pass
        return [found.get(number) for number in numbers]

"""`lmm-r1 serve_rm --model FOLDER --port 5000`: rewards by a trained reward model, over HTTP."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import add_access_arguments, media_access, refuse_other_names
from lmm_r1.config.generation import BatchConfig, StepScores
from lmm_r1.config.hardware import default_param_dtype
from lmm_r1.config.preferences import RMDeepSpeedConfig
from remote_rm.registry import add_listening_arguments, parse_flags, positive, server_parser

if TYPE_CHECKING:
    from lmm_r1.scoring.reward_judge import ServedRewards

PROG = "lmm-r1 serve_rm"
DESCRIPTION = (
    "Serve the rewards of a trained reward model, of whole responses or of their steps, for text and images, in OpenRLHF's "
    "remote reward protocol."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown flag or a bad value ends the process with code 2."""
    parser = build_parser()
    refuse_other_names(parser, argv)
    args = parse_flags(parser, argv)
    with user_errors(PROG):
        _serve(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of the model, then those that every reward server has."""
    parser = server_parser(prog=PROG, description=DESCRIPTION)
    parser.add_argument("--model", required=True, metavar="CHECKPOINT", help="reward model: a folder or a hub name")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="precision of the weights, as in training: by default bf16, or fp32 on a CPU without bf16 instructions",
    )
    parser.add_argument(
        "--max-len",
        type=positive(int),
        default=4096,
        metavar="TOKENS",
        help="longest prompt and response together; a longer sample is refused with 422, never cut",
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=positive(int),
        metavar="TOKENS",
        help="tokens of the samples, of one or many requests, that are computed together; by default 16384 on a GPU, and "
        "1024 on a CPU",
    )
    parser.add_argument(
        "--normalize", action="store_true", help="normalize rewards by the mean and deviation in the model's config"
    )
    parser.add_argument(
        "--value-head-prefix",
        default=RMDeepSpeedConfig.value_head_prefix,
        metavar="NAME",
        help="name of the value head's weight, if the model's config does not contain it",
    )
    _add_step_arguments(parser)
    add_access_arguments(parser, named_by="prompts")
    add_listening_arguments(parser)
    return parser


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step-scores",
        choices=get_args(StepScores),
        default=BatchConfig.step_scores,
        help="how a process reward model's step scores become the reward of a response",
    )
    parser.add_argument(
        "--placeholder-token",
        metavar="TOKEN",
        help="token after each step, for a process reward model whose config does not name it",
    )
    parser.add_argument(
        "--reward-tokens",
        nargs=2,
        default=(),
        metavar=("RIGHT", "WRONG"),
        help="its tokens of a right step and of a wrong one; by default those in its config",
    )


def _serve(args: argparse.Namespace) -> None:
    media = media_access(args)
    from lmm_r1 import cpu
    from lmm_r1.lmm_kits.registry import kit_name_of
    from lmm_r1.scoring.reward_judge import serve
    from remote_rm.service.server import ListeningOptions

    # Checked before PyTorch is loaded, so that a refusal is fast.
    kit_name_of(args.model, trust_remote_code=args.trust_remote_code)

    dtype = args.dtype or default_param_dtype(flag="dtype")

    def load() -> "ServedRewards[Any]":
        cpu.prepare_process()
        return _load(args, dtype=dtype)

    serve(load, media=media, options=ListeningOptions.from_arguments(args))


def _load(args: argparse.Namespace, *, dtype: str) -> "ServedRewards[Any]":
    """Return the loaded reward model; raises UserError for a checkpoint that is not a reward model."""
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.scoring import StepJudging
    from lmm_r1.scoring.reward_judge import ResponseRewards, StepRewards
    from lmm_r1.scoring.reward_model import ProcessRewardModel, RewardModel

    judging = StepJudging(
        step_scores=args.step_scores, placeholder_token=args.placeholder_token, reward_tokens=tuple(args.reward_tokens)
    )
    of_whole = ["--normalize"] if args.normalize else []
    if args.value_head_prefix != RMDeepSpeedConfig.value_head_prefix:
        of_whole.append(f"--value_head_prefix {args.value_head_prefix}")
    settings = {
        "dtype": dtype,
        "max_len": args.max_len,
        "max_batch_tokens": args.max_batch_tokens,
        "trust_remote_code": args.trust_remote_code,
    }
    checkpoint = Checkpoint(args.model, trust_remote_code=args.trust_remote_code)
    if judging.is_of(checkpoint, of_whole=of_whole):
        return StepRewards(
            ProcessRewardModel(args.model, judging=judging, **settings), step_scores=judging.step_scores
        )
    model = RewardModel(args.model, value_head_prefix=args.value_head_prefix, normalize=args.normalize, **settings)
    return ResponseRewards(model)


if __name__ == "__main__":
    run_command(main)

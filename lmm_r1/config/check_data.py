"""Every flag of `lmm-r1 check_data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tyro

from lmm_r1.config.ppo import PPODataConfig
from lmm_r1.config.shared import RowsConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

Kind: TypeAlias = Literal["prompts", "preference", "unpaired", "steps"]
"""What rows are for: RL and SFT; DPO and reward models; KTO; process reward models."""


@dataclass(frozen=True, kw_only=True)
class CheckDataConfig(RowsConfig):
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Row file, folder or dataset to check, as --data.prompt_dataset and --data.dataset take it."""
    model: str | None = None
    """Model whose processor counts the tokens, a folder or a hub name; None leaves lengths unchecked."""
    kind: Kind | None = None
    """Kind of the rows; None detects it from the columns of the file."""
    chosen_key: str | None = None
    """Column of a preference with the better response; None takes `chosen`."""
    rejected_key: str | None = None
    """Column of a preference with the worse response; None takes `rejected`."""
    step_tag: str | None = None
    """Text after each step in a text with steps; None takes Math-Shepherd's."""
    against: tuple[str, ...] = ()
    """Other row files, for example held-out ones; rows that also occur there are reported."""
    verifiers: tuple[str, ...] = ("math",)
    """Verifiers, as named by `serve_verifier`, that must accept every row's own answer."""
    max_len: int = PPODataConfig.max_len
    """Longest sequence of the training, in tokens."""
    max_new_tokens: int | None = None
    """Longest response. A prompt must leave this much room in max_len; None requires one token."""
    split: str = "train"
    """Split of a dataset that has several."""
    max_rows: int | None = None
    """Rows taken from the start of each file; None takes all."""
    html: Path = Path("check_data.html")
    """Page to write: statistics, findings, and rows with their images."""
    output: Path | None = None
    """JSON file to write with all findings."""
    thumbnails: int = 48
    """Rows shown on the page in addition to those with findings, spread evenly over the file."""
    judge_workers: int = 2
    """Processes per verifier for answers that simple rules cannot judge."""
    judge_timeout: float = 5.0
    """Seconds after which judging an answer is cut off; this is also a finding."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's checkpoint."""


def check(config: CheckDataConfig) -> None:
    """Raise UserError for contradictions between flags."""
    for flag, value in (("--chosen_key", config.chosen_key), ("--rejected_key", config.rejected_key)):
        if value is not None and config.kind not in (None, "preference"):
            raise UserError(
                f"{flag} {value}: is for preferences, and --kind {config.kind} is given; leave one of them out"
            )
    for name in ("max_len", "max_new_tokens", "max_rows", "judge_workers"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be 1 or more")
    if config.max_new_tokens is not None and config.max_new_tokens >= config.max_len:
        raise UserError(
            f"--max_new_tokens {config.max_new_tokens}: leaves no room for a prompt in --max_len {config.max_len}; "
            "raise that, or lower this"
        )
    if config.thumbnails < 0:
        raise UserError(f"--thumbnails {config.thumbnails}: must be 0 or more")
    if config.judge_timeout <= 0:
        raise UserError(f"--judge_timeout {config.judge_timeout}: must be above 0")
    for flag, path in (("--html", config.html), ("--output", config.output)):
        if path is not None:
            check_creatable(path, flag=flag)
            if path.is_dir():
                raise UserError(f"{flag} {path} is a folder; name a file")
    if config.output == config.html:
        raise UserError(f"--output {config.output} is also the path of the page; choose another file")

"""What the help of a command with many flags begins with; each command's own stands beside its flags."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Example:
    """A command line that works as it stands."""

    what: str
    """What it does, in a line."""
    arguments: str
    """What stands behind the command's name, as a shell reads it."""


@dataclass(frozen=True, kw_only=True)
class FirstHelp:
    """Three examples, and the ten flags that most runs give."""

    examples: tuple[Example, Example, Example]
    flags: tuple[str, ...]
    """Dotted names, in the order in which they are shown."""


# Of every trainer that learns from rows.
SUPERVISED_FLAGS = (
    *("model.model_name_or_path", "data.dataset", "data.max_len", "ckpt.output_dir", "adam.lr", "train.max_epochs"),
    *("train.batch_size", "eval.dataset"),
)


def supervised_help(*examples: Example, flags: tuple[str, str]) -> FirstHelp:
    """Return the first help of a trainer that learns from rows.

    Args:
        examples: three of them.
        flags: the two that matter in this trainer beside those of all.
    """
    first, second, third = examples
    return FirstHelp(examples=(first, second, third), flags=(*SUPERVISED_FLAGS, *flags))

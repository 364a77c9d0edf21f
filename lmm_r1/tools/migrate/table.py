"""Tables of converted settings, and the YAML document written from them."""

from __future__ import annotations

import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import yaml

from lmm_r1 import dotted
from lmm_r1.config.declared import has_effect
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.resolve import by_what_is_trained, unplanned
from lmm_r1.config.supervised import DPOConfig, KDConfig, RMConfig, SFTConfig, SupervisedConfig
from lmm_r1.errors import UserError

Command = Literal["train_ppo_ray", "train_sft", "train_dpo", "train_rm", "train_kd"]
CONFIG_CLASSES: Mapping[Command, type[PPOConfig] | type[SupervisedConfig]] = {
    "train_ppo_ray": PPOConfig,
    "train_sft": SFTConfig,
    "train_dpo": DPOConfig,
    "train_rm": RMConfig,
    "train_kd": KDConfig,
}
NoteKind = Literal["without counterpart", "another meaning", "derived"]
TRACKERS = ("wandb", "tensorboard")
NOT_NEEDED = "not needed here"
KEEP_ALL = 1_000_000
"""Number of checkpoints to keep if none is deleted."""


TO_FILL_IN = re.compile(
    r"\$\{[^{}]*\}|\$\(\(.*?\)\)|\$\([^()]*\)|\$\w+|<[A-Za-z][\w -]*>|\[(?:YOUR|PATH|your|path)[^\[\]]*\]|\{[A-Za-z_]+\}"
    r"|(?:/|\b)path/to\b|\b(?:YOUR|your)[_-]\w+"
)
"""What a published file leaves to whoever uses it: variables without a value, and places such as [YOUR_IMAGES_DIR]."""


OURS: Final = object()
"""Used instead of a default: if the setting is not given, ours applies."""


_GROUPS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8")
)


class Setting(NamedTuple):
    """A setting of another system: flags of ours that take its value, or a rule that reads it, or neither."""

    name: str
    default: object = None
    """Their default; if ours differs, it is written to the file, so that the run stays the same."""
    flags: tuple[str, ...] = ()
    """Ours, which take the value as it is."""
    by_rule: bool = False
    """Whether a rule makes flags or notes of it, together with others."""
    says: str = ""
    """What replaces it here; for a setting without a counterpart, the reason and what to do."""
    harmless: Sequence[object] = ()
    """Values of a setting without counterpart that ask for nothing but what happens here anyway."""


def settings_of(groups: str, **words: str) -> tuple[Setting, ...]:
    """Return the settings of groups of `settings.yaml`.

    Args:
        groups: their names, with blanks between them.
        words: replace their names in braces in our flags.
    """
    taken: list[Setting] = []
    for rows in map(_GROUPS.__getitem__, groups.split()):
        for name, row in rows.get("flags", {}).items():
            flags, *default = row if isinstance(row, list) else [row]
            named = (flag.format(**words) for flag in (flags if isinstance(flags, list) else [flags]))
            taken.append(Setting(name, default[0] if default else OURS, tuple(named)))
        for name, default in rows.get("by_rule", {}).items():
            taken.append(Setting(name, default, by_rule=True))
        for name, (says, default) in rows.get("explained", {}).items():
            taken.append(Setting(name, default, by_rule=True, says=says))
        taken += [Setting(name, by_rule=True) for name in rows.get("by_rule_names", "").split()]
        for name, (says, *harmless) in rows.get("no_counterpart", {}).items():
            taken.append(Setting(name, harmless[0], says=says, harmless=harmless))
        for why, names in {**rows.get("absent", {}), NOT_NEEDED: rows.get("not_needed", "")}.items():
            taken += [Setting(name, says=why, harmless=(None,)) for name in names.split()]
    return tuple(taken)


def names_of(group: str) -> Mapping[str, Any]:
    """Return a mapping of `settings.yaml`: the table's names by other names, or defaults by names."""
    return _GROUPS[group]


class Note(NamedTuple):
    """What a user should know of one setting's conversion."""

    kind: NoteKind
    subject: str
    """Their setting."""
    text: str


Rule: TypeAlias = "Callable[[Given], None]"
lacks = functools.partial(Note, "without counterpart")
differs = functools.partial(Note, "another meaning")
"""Notes on a setting that is not here, and on one that means something else here."""


def trackers(given: Given, setting: str, *silent: str) -> None:
    """Set the trackers of a setting, and note those that are not here and not silent."""
    names = [str(name) for name in listed(given[setting])]
    given.set("logger.trackers", [name for name in names if name in TRACKERS])
    for name in names:
        if name not in (*TRACKERS, *silent):
            given.lacks(setting, f"{name}; --logger.trackers has {', '.join(TRACKERS)}")


def checkpoints_kept(given: Given, limit: str, only_model: str) -> None:
    """Set how many checkpoints are kept, without a limit or with a negative one all, and in which form."""
    most = -1 if given[limit] is None else given.whole(limit)
    given.set("ckpt.max_num", KEEP_ALL if most < 0 else most)
    if given.switch(only_model):
        given.set("ckpt.save_hf", True)
        given.differs(only_model, "each checkpoint has the model, and what a stopped run resumes from")


def listed(value: object) -> list[object]:
    """Return a list as it is, and any other value as a list of it."""
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True, kw_only=True)
class Table:
    """All settings of one command of another system."""

    system: str
    """Its name, for messages."""
    command: Command
    """Ours, which does the same."""
    settings: tuple[Setting, ...]
    rules: tuple[Rule, ...]
    prefix: str = ""
    """Prefix of a name on its command line."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The table's names of settings that have other names in files."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Why settings that the table does not list have no counterpart, by a part of their names."""

    @property
    def by_name(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in self.settings}


class OpenPlace(NamedTuple):
    """A part of a value that the file leaves open."""

    flag: str
    text: str
    """As the file writes it."""
    why: str


class Conversion(NamedTuple):
    """What became of a run's settings."""

    command: Command
    flags: Mapping[str, object]
    """By the dotted names of ours."""
    defaults: Sequence[str]
    """Flags that hold a default of theirs, because nothing was given for them."""
    notes: Sequence[Note]
    open: Sequence[OpenPlace]
    """Values to fill in before a run."""


class Given:
    """A run's values by their names, with the defaults of the system underneath, and what rules make of them."""

    def __init__(self, values: Mapping[str, object], table: Table) -> None:
        self._values, self._settings, self._prefix = values, table.by_name, table.prefix
        self.read: set[str] = set()
        """Names of the settings that rules have read."""
        self.flags: dict[str, object] = {}
        self.notes: list[Note] = []

    def set(self, flag: str, value: object) -> None:
        """Give a flag of ours a value; the last one counts."""
        self.flags[flag] = value

    def _note(self, kind: NoteKind, subject: str, text: str) -> None:
        self.notes.append(Note(kind, subject, text))

    lacks = functools.partialmethod(_note, "without counterpart")
    differs = functools.partialmethod(_note, "another meaning")
    derived = functools.partialmethod(_note, "derived")

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        value = self._values.get(name, self._settings[name].default)
        return None if value is OURS else value

    def has(self, name: str) -> bool:
        """Return whether the run gives a value; this counts as reading it."""
        self.read.add(name)
        return name in self._values

    def number(self, name: str) -> float:
        """Return the value as a number; raises UserError for what is none."""
        try:
            return float(str(self[name]))
        except ValueError:
            raise self._wrong(name, "a number") from None

    def whole(self, name: str) -> int:
        """Return the value as a whole number; raises UserError for what is none."""
        if (number := self.number(name)) % 1:
            raise self._wrong(name, "a whole number")
        return int(number)

    def switch(self, name: str) -> bool:
        """Return the value as true or false; raises UserError for what is neither."""
        if not isinstance(value := self[name], bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return the value as text, None if there is none; raises UserError for a list or a group."""
        if isinstance(value := self[name], (list, dict)):
            raise self._wrong(name, "one text")
        return None if value in (None, "") else str(value)

    def group(self, name: str) -> Mapping[str, object]:
        """Return the values that are nested in a setting, or in its JSON; raises UserError for any other value."""
        value = self[name]
        if isinstance(value, str) and value:
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise UserError(f"{self._prefix}{name} {value!r} is not valid JSON: {error}") from error
        if not isinstance(value := value or {}, dict):
            raise self._wrong(name, "a group of settings")
        return value

    def _wrong(self, name: str, wanted: str) -> UserError:
        open_place = TO_FILL_IN.search(str(self[name]))
        variable = re.search(r"[A-Za-z_]\w*", open_place[0]) if open_place else None
        advice = f"give {variable[0]}=VALUE after the file's name" if variable else "correct it"
        return UserError(f"{self._prefix}{name} is {self[name]!r}, and must be {wanted}; {advice}")


def convert(
    values: Mapping[str, object],
    table: Table,
    *,
    shown: Mapping[str, str] | None = None,
    why_open: Mapping[str, str] | None = None,
    remarks: Sequence[Note] = (),
) -> Conversion:
    """Return the flags that the given values are here, and notes on all that is not the same.

    Args:
        values: by the names of the table; other names are listed as without counterpart.
        shown: names of settings for the notes, if they differ from the table's.
        why_open: why variables have no value, by how the file writes them.
        remarks: more notes.

    Raises:
        UserError: a value is not of the kind that its setting has.
    """
    config_class: Any = CONFIG_CLASSES[table.command]
    known = dotted.leaf_types(config_class)
    given, theirs = Given(values, table), dict[str, object]()
    flags, notes = given.flags, given.notes
    for name, default, own, by_rule, says, harmless in table.settings:
        value = values.get(name, default)
        if name in values:
            # Nothing is given as `null`, unless that is a value of ours.
            taking = (flag for flag in own if value is not None or type(None) in typing.get_args(known[flag]))
            flags |= dict.fromkeys(taking, value)
            notes += [lacks(name, says)] if not own and not by_rule and value not in harmless else []
        elif value is not OURS:
            theirs |= dict.fromkeys(own, value)
    for rule in table.rules:
        rule(given)
    for one in table.settings:
        if one.by_rule and one.name not in given.read and values.get(one.name, one.default) != one.default:
            notes.append(lacks(one.name, "it has no effect with the other settings"))
    ours = _our_defaults(config_class(), flags)
    others = {flag: value for flag, value in theirs.items() if _plain(dotted.get(ours, flag)) != _plain(value)}
    defaults = [flag for flag in others if flag not in flags]
    flags = {**others, **flags}
    for name in values:
        if name not in table.by_name:
            why = (why for part, why in table.families.items() if part in name)
            notes.append(lacks(name, next(why, f"not known as a setting of {table.system}")))
    in_order = {flag: _fitted(_plain(flags[flag]), hint) for flag, hint in known.items() if flag in flags}
    assert in_order.keys() == flags.keys(), f"no flags: {sorted(flags.keys() - in_order.keys())}"
    run = dotted.replace(config_class(), in_order)
    # For what the run does not have, such as a critic: it would refuse them.
    for flag, value in list(in_order.items()):
        is_default = value == _plain(dotted.get(ours, flag))
        if not is_default and not has_effect(flag, run, or_warns=flag not in defaults):
            del in_order[flag], flags[flag]
            given_as = [one.name for one in table.settings if flag in one.flags and one.name in values]
            notes += [lacks(name, f"--{flag} has no effect in this run") for name in given_as]
    return Conversion(
        table.command,
        in_order,
        defaults=[name for name in defaults if name in flags],
        notes=[*(_renamed(note, shown) if shown else note for note in notes), *remarks],
        open=list(_open_places(in_order, why_open or {})),
    )


def _our_defaults(config: Any, flags: Mapping[str, object]) -> Any:
    """Return the defaults of a run with these flags; what a plan would choose is taken over only if it is given."""
    # What is trained: all weights or adapters, and whether a critic.
    trained = {flag: flags[flag] for flag in ("ds.lora.rank", "algo.advantage.estimator") if flag in flags}
    if not isinstance(trained.get("ds.lora.rank", 0), int):
        del trained["ds.lora.rank"]  # a variable of a script
    config = dotted.replace(config, trained)
    return unplanned(dotted.replace(config, by_what_is_trained(config)))


def _fitted(value: object, hint: object) -> object:
    """Return a value as its flag takes it: one name of a list, 1e8 for a whole number, or text that was split at blanks."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return value if value is None else [value]
    if isinstance(value, list) and str in kinds:
        return " ".join(map(str, value))
    is_whole = isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds
    return int(typing.cast(float, value)) if is_whole else value


def _open_places(flags: Mapping[str, object], why: Mapping[str, str]) -> Iterator[OpenPlace]:
    for flag, value in flags.items():
        texts = value if isinstance(value, list) else [value]
        found = dict.fromkeys(match[0] for text in texts for match in TO_FILL_IN.finditer(str(text)))
        # A tag that is closed belongs to the text.
        places = (text for text in found if f"</{text[1:]}" not in str(value))
        yield from (OpenPlace(flag, text, why.get(text, "")) for text in places)


def missing(conversion: Conversion) -> list[str]:
    """Return which of model and rows the converted settings do not name."""
    model, rows = ("actor", "prompt_dataset") if conversion.command == "train_ppo_ray" else ("model", "dataset")
    needed = {"model": f"{model}.model_name_or_path", "rows": f"data.{rows}"}
    return [f"{what} (--{flag})" for what, flag in needed.items() if not conversion.flags.get(flag)]


def _renamed(note: Note, shown: Mapping[str, str]) -> Note:
    # The longer ones first, as one name may begin with another, and all at once, as one may be what another becomes.
    names = "|".join(re.escape(name) for name in sorted(shown, key=len, reverse=True))
    whole = re.compile(rf"(?<![\w.])(?:{names})(?![\w.]\w)(?!\w)")
    subject, text = (whole.sub(lambda match: shown[match[0]], said) for said in (note.subject, note.text))
    return note._replace(subject=subject, text=text)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


TITLES: dict[NoteKind, str] = {
    "without counterpart": "Without counterpart here, left out:",
    "another meaning": "Means something else here:",
    "derived": "Made of several settings:",
}


def to_document(conversion: Conversion, *, source: str, system: str) -> str:
    """Return the file's text, which ends with a line break.

    Args:
        source: what was converted, for the first line.
    """
    comments = [f"Settings of {source} ({system}), written by `lmm-r1 convert_config`."]
    comments.append(f"Run: lmm-r1 {conversion.command} --config THIS_FILE")
    for kind, title in TITLES.items():
        subjects: dict[str, list[str]] = {}
        for note in conversion.notes:
            if note.kind == kind:
                subjects.setdefault(note.text, []).append(note.subject)
        lines = [f"  {', '.join(names)}: {text}" for text, names in subjects.items()]
        comments += [title, *lines] if lines else []
    if conversion.open:
        comments += ["To fill in before training:"]
        comments += [f"  --{one.flag}: {one.text}" + (f" ({one.why})" if one.why else "") for one in conversion.open]
    if conversion.defaults:
        comments += [f"Defaults of {system} that are not ours:", f"  {', '.join(conversion.defaults)}"]
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    tree: dict[str, object] = {}
    for name, value in conversion.flags.items():
        # A copy: YAML would write the second place of one list as a reference to the first.
        put(tree, name, list(value) if isinstance(value, list) else value, where=name)
    return head + (yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) if tree else "")


def put(tree: dict[str, object], name: str, value: object, *, where: str) -> None:
    """Set the value under a dotted name in nested mappings; raises UserError if a part of the name is no group.

    Args:
        where: the place of the setting, for the message.
    """
    *groups, last = name.split(".")
    for group in groups:
        inner = tree.get(group)
        if inner is None:
            inner = tree[group] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{where}: {group} is a setting, and no group of settings")
        tree = inner
    tree[last] = value

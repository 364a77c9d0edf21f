"""No flag that lies: set alone, each changes what a run computes or is refused by name. The pages of flags have all of them.

What a run computes is asked of the code that reads the settings: sampling, filters, losses, advantages and passes. All
other flags (files, models, optimizers, trackers) are read by name in the code of this project or of OpenRLHF.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import types
import typing
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.rl_steps import numbered, sample

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.yaml_file import parse_settings
from lmm_r1.config import PPOConfig, resolve, resolve_ppo, shared, sized_ppo
from lmm_r1.config.declared import Needs, Within, declared, given
from lmm_r1.config.differences import only_defaults
from lmm_r1.config.hardware import Offer
from lmm_r1.config.shared import JsonText
from lmm_r1.errors import UserError
from lmm_r1.rl.advantages import KLWeight
from lmm_r1.rl.batching import pass_limits
from lmm_r1.rl.filtering import GroupFilter
from lmm_r1.rl.loop import optimizer_steps
from lmm_r1.rl.losses import LossSettings
from lmm_r1.rl.outputs import _add_kl, add_advantages
from lmm_r1.rl.rollouts import group_settings

CPU = Offer(per_node=(), joined=False)
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))

from flags_page import CONFIGS, flags_page  # noqa: E402

SUPERVISED = {"model.model_name_or_path": "m", "data.dataset": "d", "ds.param_dtype": "bf16"}
BASES: dict[str, dict[str, object]] = dict.fromkeys(CONFIGS, SUPERVISED) | {
    "train_ppo_ray": {
        "actor.model_name_or_path": "m",
        "data.prompt_dataset": "d",
        "ds.param_dtype": "bf16",
        "rollout.max_new_tokens": 10,
    },
    "train_kd": SUPERVISED | {"teacher.model_name_or_path": "t"},
}
# Values that no rule of `another` gives.
VALUES = {
    "lr_scheduler": "linear",
    "loss_type": "regression",
    "reward": "math",
    "reward.remote_url": "exact",
    "best_metric_key": "eval_loss",
    "grad_accum_dtype": "bf16",
    "trackers": ("wandb",),
}
# What a flag needs in addition to what it declares.
TOGETHER = {
    "ds.load_in_4bit": {"ds.zero_stage": 2},
    "agent.thought.min_tokens": {"agent.thought.max_tokens": None},
    "eval.dataset": {"eval.steps": 2},
    "algo.advantage.is_correction_gating": {"algo.advantage.is_correction_threshold": (2.0,)},
    "algo.kl.estimator": {"algo.kl.use_loss": True},
    "algo.dynamic_filtering_max_batches": {"algo.dynamic_filtering_range": (0.25, 0.75)},
}
# Flags of the algorithm, whose effect or refusal depends on others.
COMPUTED = re.compile(
    r"algo\.(?!experience|mismatch)|rollout\.|actor\.(eps|dual|policy|sapo|loss)|reward\.(clip|overlong|stop)"
)


@cache
def read_names() -> set[str]:
    """Return the attributes and keys that the product's code and OpenRLHF's read, checks of settings left out."""
    ours = [
        path for path in (ROOT / "lmm_r1").rglob("*.py") if "check" not in path.name and path.parent.name != "migrate"
    ]
    theirs = Path(find_spec("openrlhf").origin).parent.rglob("*.py")
    trees = (ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in (*ours, *theirs))
    nodes = [node for tree in trees for node in tree]
    keys = {ast.unparse(node.slice).strip("'") for node in nodes if isinstance(node, ast.Subscript)}
    calls = [(ast.unparse(node.func), node.args) for node in nodes if isinstance(node, ast.Call)]
    gets = [names[:1] for called, names in calls if called.endswith(".get")]
    gets += [names[1:2] for called, names in calls if called == "getattr"]
    keys |= {ast.unparse(name).strip("'") for names in gets for name in names}
    return keys | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def another(command: str, flag: str) -> object:
    """Return a value other than a flag's default that it can have."""
    config_class, name = CONFIGS[command], flag.rpartition(".")[2]
    default, hint = dotted.get(config_class(), flag), dotted.leaf_types(config_class)[flag]
    if name in VALUES or flag in VALUES:
        return VALUES.get(flag, VALUES.get(name))
    if dotted.is_switch(hint):
        return not default
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    kind = kinds[0] if typing.get_origin(hint) in (types.UnionType, typing.Union) else hint
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != default)
    bounds = [said for said in declared(config_class)[flag] if isinstance(said, Within)]
    numbers = (2, 3, 1, 8) if kind is int else (0.25, 0.5, 1.5, 2.0, (0.25, 0.75), (0.25, 0.5))
    fitting = (number for number in numbers if number != default and not any(one.refusal(number) for one in bounds))
    if kind in (int, float):
        return next(number for number in fitting if isinstance(number, kind))
    if str(kind).startswith("tuple[float"):
        return next(number for number in fitting if isinstance(number, tuple))
    return ("x",) if str(kind).startswith("tuple") else '{"x": 1}' if kind is JsonText else "x"


def with_needs(command: str, flag: str) -> dict[str, object]:
    """Return settings with which a flag has an effect by what it declares."""
    found: dict[str, object] = {}
    for need in (said for said in declared(CONFIGS[command])[flag] if isinstance(said, Needs)):
        name, sign, values = need.parts(flag.rpartition(".")[0])[0]
        hint, wanted = dotted.leaf_types(CONFIGS[command])[name], another(command, name)
        default = dotted.get(CONFIGS[command](), name)
        if (sign is None and default) or (sign == "!=" and str(default) not in values):
            continue
        if sign == "~":
            wanted = tuple(values)
        elif sign == "=":
            wanted = next(iter(parse_settings(f"{name}: {values[0]}", {name: hint}, source=None).values()))
        found |= with_needs(command, name) | {name: wanted} if name != flag else {}
    return found | TOGETHER.get(flag, {})


def computed(config: object) -> str:
    """Return what a run of these settings computes, as text."""
    if not isinstance(config, PPOConfig):
        return ""
    config, _ = sized_ppo(config, rows=512)
    size = config.rollout.n_samples_per_prompt
    samples = numbered([sample([1], [5] * (4 + place), reward=place * 1.2, group=0) for place in range(size)])
    samples[-1].truncated = True
    for one in samples:
        one.log_probs = one.values = torch.linspace(-1, -0.2, len(one.loss_mask))
        one.reference_log_probs = 2 * one.log_probs if config.algo.kl.init_coef else None
        _add_kl(one, config)
    kl = config.algo.kl
    weight = KLWeight(value=kl.init_coef, target=kl.target, horizon=kl.horizon)
    add_advantages(samples, config, kl_weight=weight.value, greedy=[sample([1], [5], reward=3.0)])
    weight.update(1.0, samples=64)
    parts = [LossSettings.of(config), group_settings(config), GroupFilter.of(config), weight, kl]
    parts += [
        optimizer_steps(config, num_rows=512),
        config.rollout.vllm_generate_batch_size,
        config.rollout.oversample_max_held,
    ]
    parts += [
        pass_limits(config, group, share_prefix=config.train.shared_prefix_enable)
        for group in (config.rollout, config.train)
    ]
    return f"{parts} {config.rollout.oversample} {[one.advantages.tolist() for one in samples]}"


def taken(command: str, **changes: object) -> object:
    """Return the resolved settings of a run with these changes, or why they are refused."""
    config = dotted.replace(CONFIGS[command](), BASES[command] | changes)
    try:
        return resolve_ppo(config, ask=lambda: CPU) if command == "train_ppo_ray" else resolve(config)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("command", CONFIGS)
def test_every_flag_alone_changes_the_run_or_is_refused(command, caplog):
    plain = computed(taken(command))
    for flag in dotted.leaf_types(CONFIGS[command]).keys() - BASES[command].keys():
        value = another(command, flag)
        caplog.clear()
        config = taken(command, **{flag: value})
        told = config if isinstance(config, str) else caplog.text
        if given(flag, value) in told or f"--{flag}" in told:
            continue
        assert dotted.get(config, flag) == value, f"{flag} {value} is not taken as it is, and nobody is told: {told}"
        assert flag.rpartition(".")[2] in read_names(), f"nobody reads {flag}"
        if command == "train_ppo_ray" and COMPUTED.match(flag):
            assert computed(config) != plain, f"{flag} {value} changes nothing"


@pytest.mark.parametrize("command", CONFIGS)
def test_a_flag_with_what_it_declares_to_need_is_taken_and_has_its_effect(command, caplog, monkeypatch):
    monkeypatch.setattr(shared, "find_spec", lambda name: name)
    for flag, said in declared(CONFIGS[command]).items():
        if not any(isinstance(one, Needs) for one in said):
            continue
        needed = with_needs(command, flag)
        caplog.clear()
        config = taken(command, **(needed | {flag: another(command, flag)}))
        assert not isinstance(config, str), config
        assert f"--{flag} " not in caplog.text, flag
        if COMPUTED.match(flag) and command == "train_ppo_ray":
            assert computed(config) != computed(taken(command, **needed)), flag


@pytest.mark.parametrize("command", CONFIGS)
def test_a_value_outside_of_its_range_is_refused_by_name(command):
    for flag, said in declared(CONFIGS[command]).items():
        for bound in (one for one in said if isinstance(one, Within)):
            double = "tuple" in str(dotted.leaf_types(CONFIGS[command])[flag])
            values = [(value, 0.5) if double else value for value in (-2, math.nan, *([0.75] if bound.rising else []))]
            values = [value for value in values if bound.refusal(value)]
            assert values, flag
            assert all(taken(command, **{flag: value}).startswith(f"--{flag} ") for value in values), flag


@pytest.mark.parametrize("command", CONFIGS)
def test_a_flag_of_openrlhf_with_one_value_is_accepted_with_it_and_refused_with_another(command, capsys, tmp_path):
    config_class = CONFIGS[command]
    accepted = only_defaults(dotted.leaf_types(config_class))
    assert len(accepted) == {"train_ppo_ray": 9, "train_rm": 7}.get(command, 6)
    file = tmp_path / "stage.yaml"
    file.write_text("".join(f"{flag}: {known.value}\n" for flag, known in accepted.items()))
    assert parse(config_class, ["--config", str(file)], prog=command, description="") is not None
    for flag, known in accepted.items():
        group, dot, name = flag.rpartition(".")
        switch = isinstance(known.value, bool)
        given, other = [f"--{flag}"], [f"--{group}{dot}no_{name}"]
        if known.value is not True:
            given, other = (other, given) if switch else ([*given, str(known.value)], [*given, "2"])
        parse(config_class, [*given, "--train.seed", "3"], prog=command, description="")
        file.write_text(f"{flag}: {not known.value if switch else 2}\n")
        for refused in (other, ["--config", str(file)]):
            with pytest.raises(SystemExit):
                parse(config_class, refused, prog=command, description="")
            said = capsys.readouterr().err
            assert re.search(
                rf"{group}{dot}(no_)?{name}.* is not available in this version; {re.escape(known.instead)}", said
            )


@pytest.mark.parametrize("command", CONFIGS)
def test_the_page_of_a_command_has_each_of_its_flags_once_with_its_effect_type_and_default(command):
    page = flags_page(command)
    entries = re.findall(r"^### `--(\S+)` \{#(\S+)\}\n\n(\S.*) \((.+); default (.+)\)$", page, flags=re.MULTILINE)
    assert sorted(flag for flag, *_ in entries) == sorted(dotted.leaf_types(CONFIGS[command]))
    assert all(flag == anchor for flag, anchor, *_ in entries)
    groups = re.findall(r"^## (\S+)", page, flags=re.MULTILINE)
    assert len(groups) == len(set(groups)) >= 10

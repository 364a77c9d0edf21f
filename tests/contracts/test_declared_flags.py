"""No flag that lies: what each declares is checked, and somebody reads it."""

from __future__ import annotations

import ast
import math
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config.declared import Needs, Within, check_needs, check_ranges, declared
from lmm_r1.config.differences import only_defaults
from lmm_r1.errors import UserError
from lmm_r1.tools.report.curves import METRICS

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))

from flags_page import CONFIGS, METRICS_PAGE, metrics_page  # noqa: E402


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


@pytest.mark.parametrize("command", CONFIGS)
def test_every_flag_is_read(command):
    assert {
        flag for flag in dotted.leaf_types(CONFIGS[command]) if flag.rpartition(".")[2] not in read_names()
    } == set()


@pytest.mark.parametrize("command", CONFIGS)
def test_a_value_outside_of_its_range_is_refused_by_name(command):
    defaults = CONFIGS[command]()
    for flag, said in declared(CONFIGS[command]).items():
        for bound in (one for one in said if isinstance(one, Within)):
            double = "tuple" in str(dotted.leaf_types(CONFIGS[command])[flag])
            values = [(value, 0.5) if double else value for value in (-2, math.nan, *([0.75] if bound.rising else []))]
            values = [value for value in values if bound.refusal(value)]
            assert values, flag
            for value in values:
                with pytest.raises(UserError, match=f"^--{re.escape(flag)} .* must be "):
                    check_ranges(dotted.replace(defaults, {flag: value}))


@pytest.mark.parametrize("command", CONFIGS)
def test_a_flag_without_what_it_needs_is_refused_or_reported_by_name(command, caplog):
    defaults, hints = CONFIGS[command](), dotted.leaf_types(CONFIGS[command])
    if command == "train_ppo_ray":
        defaults = dotted.replace(defaults, {"rollout.n_samples_per_prompt": 8})
    for flag, said in declared(CONFIGS[command]).items():
        group, dot, name = flag.rpartition(".")
        for need in (one for one in said if isinstance(one, Needs)):
            if need.when or need.holds(defaults, group=group):
                continue
            value = not dotted.get(defaults, flag) if dotted.is_switch(hints[flag]) else "another"
            config = dotted.replace(defaults, {flag: value})
            caplog.clear()
            told = ""
            try:
                check_needs(config, config)
            except UserError as error:
                told = str(error)
            told += caplog.text
            named = f"{group}{dot}no_{name}" if value is False else flag
            assert re.search(rf"--{re.escape(named)}( another)? (has no effect unless|requires that) --", told), told


@pytest.mark.parametrize("command", CONFIGS)
def test_a_flag_of_openrlhf_with_one_value_is_accepted_with_it_and_refused_with_another(command, capsys, tmp_path):
    config_class = CONFIGS[command]
    accepted = only_defaults(dotted.leaf_types(config_class))
    assert len(accepted) > 6
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
        if known.value == 2:
            other = [f"--{flag}", "3"]
        file.write_text(f"{flag}: {not known.value if switch else other[-1]}\n")
        for refused in (other, ["--config", str(file)]):
            with pytest.raises(SystemExit):
                parse(config_class, refused, prog=command, description="")
            said = capsys.readouterr().err
            assert re.search(
                rf"{group}{dot}(no_)?{name}.* is not available in this version; {re.escape(known.instead)}", said
            )


def test_the_page_of_metrics_is_as_it_is_built_and_lists_each_once_with_flags_that_exist():
    shown = METRICS_PAGE.read_text(encoding="utf-8")
    wrong = sorted(set(shown.splitlines()) ^ set(metrics_page().splitlines()))
    assert (wrong[:3], shown == metrics_page()) == ([], True), "run `make docs`"
    names = [name for spec in METRICS for name in spec.metrics]
    assert len(names) == len(set(names))
    known = {flag for config in CONFIGS.values() for flag in dotted.leaf_types(config)}
    assert set(re.findall(r"`--([\w.]+)", shown)) <= known

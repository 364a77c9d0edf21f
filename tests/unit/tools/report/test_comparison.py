import json

import pytest
from helpers.run_folders import PageText, rollout, scores, write_curriculum, write_lines, write_stage

from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import chained, note_evaluation, read_run
from lmm_r1.tools.report import (
    build_comparison,
    build_report,
    compared_rows,
    distinct_names,
    match_stages,
    settings_differences,
    stage_rows,
)
from lmm_r1.tools.report.curves import overlays


def write_run(folder, *, stages, settings=None, accuracies=(), **metrics):
    """Write a curriculum folder whose stages log one step of these metrics."""
    for hour, name in enumerate(stages):
        write_stage(folder / name, name=name, steps=2, seconds=1.0, hour=hour)
        write_lines(folder / name / "metrics.jsonl", [{"step": 1, **metrics}, {"step": 2, **metrics}])
        if settings is not None:
            (folder / name / "run_config.yaml").write_text(settings)
    if accuracies:
        checkpoints = [
            {"name": name, "path": "", "files": {"text": scores(accuracy=accuracy, form=1.0, tokens=9.0)}}
            for name, accuracy in zip(stages, accuracies, strict=True)
        ]
        evaluation = {"settings": {"temperature": 0.0, "output": str(folder)}, "checkpoints": checkpoints}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return read_run(folder)


def test_names_take_as_many_folders_as_it_needs_to_tell_them_apart(tmp_path):
    folders = [tmp_path / name for name in ("a/x/demo", "b/x/demo", "c")]
    assert distinct_names(folders) == ["a/x/demo", "b/x/demo", "c"]
    assert distinct_names([tmp_path / "demo", tmp_path / "demo" / "demo"]) == [f"{tmp_path.name}/demo", "demo/demo"]
    with pytest.raises(UserError, match="given twice"):
        distinct_names([tmp_path / "demo", tmp_path / "x" / ".." / "demo"])


def test_stages_of_one_name_meet_and_those_of_single_stage_runs_always_do(tmp_path):
    first = write_run(tmp_path / "first", stages=["cold", "fre"])
    second = write_run(tmp_path / "second", stages=["fre", "mgt"])
    lonely = read_run(write_run(tmp_path / "third", stages=["direct"]).folder / "direct")
    other = read_run(tmp_path / "second" / "mgt")
    assert [(match.name, sorted(match.rows)) for match in match_stages([first, second, lonely])] == [
        ("cold", [0]), ("fre", [0, 1]), ("mgt", [1]), ("direct", [2]),
    ]  # fmt: skip
    assert [(match.name, sorted(match.rows)) for match in match_stages([lonely, other])] == [("direct, mgt", [0, 1])]


def write_lone(folder, *, hour, model, section="actor", name="rl"):
    write_stage(folder, name=name, steps=2, seconds=1.0, hour=hour)
    (folder / "run_config.yaml").write_text(f"{section}:\n  model_name_or_path: {model}\n")
    return read_run(folder)


def test_runs_that_were_trained_from_each_other_are_a_chain_and_others_are_not(tmp_path, monkeypatch):
    sft = write_lone(tmp_path / "runs/sft", hour=1, model="Qwen/Qwen2.5-VL-3B", section="model", name="sft")
    fre = write_lone(tmp_path / "runs/fre", hour=2, model=tmp_path / "runs/sft")
    # Relative to the folder in which the training was started.
    mgt = write_lone(tmp_path / "runs/mgt", hour=3, model="./runs/fre")
    rival = write_lone(tmp_path / "runs/rival", hour=4, model=tmp_path / "runs/sft")
    chain = chained([mgt, sft, fre])
    assert (chain.name, chain.folder) == ("sft → fre → mgt", tmp_path / "runs/mgt")
    # Two of them have the same stage name.
    assert [stage.name for stage in chain.stages] == ["sft", "fre", "mgt"]
    assert [stage.name for stage in chained([sft, fre]).stages] == ["sft", "rl"]
    assert chained([sft, fre, rival]) is None
    assert chained([fre, rival]) is None
    assert chained([sft]) is None
    monkeypatch.chdir(tmp_path)
    assert chained([sft, fre, mgt]) is not None


def test_an_evaluation_is_found_from_the_runs_that_it_measured(tmp_path):
    sft = tmp_path / "runs/sft"
    write_lone(sft, hour=1, model="base", section="model", name="cold start")
    write_lone(tmp_path / "runs/rl", hour=2, model=sft)
    for file, accuracies in (("first", {"text": (0.25, 0.5)}), ("second", {"text": (0.3, 0.6), "image": (0.1, 0.2)})):
        checkpoints = [
            {
                "name": name,
                "files": {key: scores(accuracy=both[place], form=1.0, tokens=9.0) for key, both in accuracies.items()},
            }
            for place, name in enumerate(("sft", "rl"))
        ]
        output = tmp_path / f"{file}.json"
        output.write_text(json.dumps({"settings": {"temperature": 1.0}, "checkpoints": checkpoints}))
        for name in ("sft", "rl"):
            for _ in range(2):
                note_evaluation(str(tmp_path / "runs" / name), name=name, evaluation=output)
    note_evaluation("Qwen/Qwen2.5-VL-3B", name="base", evaluation=output)
    note_evaluation("", name="rejudged", evaluation=output)
    assert len((sft / "evaluations.jsonl").read_text().splitlines()) == 2
    chain = chained([read_run(sft), read_run(tmp_path / "runs/rl")])
    assert [[cell.scores.accuracy for cell in row.held_out] for row in stage_rows(chain)] == [[0.3, 0.1], [0.6, 0.2]]
    assert "30.0" in build_report(chain)
    output.unlink()
    assert read_run(sft).evaluation.checkpoints[0].files["text"].accuracy == 0.25


def test_differences_are_to_the_same_stage_of_the_first_run(tmp_path):
    runs = [
        write_run(tmp_path / "first", stages=["fre", "mgt"], accuracies=[0.5, 0.75]),
        write_run(tmp_path / "second", stages=["fre", "mgt"], accuracies=[0.75, 0.7]),
    ]
    fre, mgt = (compared_rows(match, files=["text"]) for match in match_stages(runs))
    assert [row.held_out[0].change for _, row in fre] == [None, 0.25]
    assert fre[1][1].held_out[0].is_clear
    assert mgt[1][1].held_out[0].change == pytest.approx(-0.05)
    # 150 and 140 of 200 rows: chance may well make such a difference.
    assert not mgt[1][1].held_out[0].is_clear


def test_a_metric_of_all_runs_shares_one_chart_and_a_run_keeps_its_colour(tmp_path):
    runs = [
        write_run(tmp_path / "first", stages=["fre"], reward=1.0, accuracy=0.5),
        write_run(tmp_path / "second", stages=["fre"], reward=2.0, odd=0.1),
        write_run(tmp_path / "third", stages=["mgt", "later"], reward=3.0),
    ]
    shared, single = overlays(match_stages(runs), names=["first", "second", "third"])
    drawn = {
        panel.spec.title: [(line.name, line.color, line.run, line.dash) for line in panel.lines]
        for panel in shared.panels
    }
    assert drawn == {"Reward": [("first", 1, 0, 0), ("second", 2, 1, 0)], "Accuracy and format": [("first", 1, 0, 0)]}
    assert [panel.spec.title for panel in shared.other_panels] == ["odd"]
    assert single.title == "Stages that only one run has"
    assert [(line.name, line.color, line.dash) for line in single.panels[0].lines] == [
        ("third: mgt", 3, 0), ("third: later", 3, 1),
    ]  # fmt: skip


def test_only_settings_that_differ_are_listed_and_no_credential(tmp_path):
    text = "actor:\n  adam:\n    lr: {}\n  betas: [0.9, 0.95]\nlogger:\n  wandb:\n    key: {}\nflag: true\n{}"
    runs = [
        write_run(tmp_path / "a", stages=["fre"], settings=text.format("1e-6", "secret-one", ""), accuracies=[0.5]),
        write_run(
            tmp_path / "b", stages=["fre"], settings=text.format("2e-6", "secret-two", "new: ''"), accuracies=[1]
        ),
        write_run(tmp_path / "c", stages=["fre"], settings="a: [", accuracies=[0.5]),
    ]
    fre, evaluation = settings_differences(runs, matches=match_stages(runs))
    assert (fre.title, fre.runs, fre.unknown, fre.same) == ("fre", (0, 1), (2,), 3)
    assert fre.rows == {"actor.adam.lr": ("1e-6", "2e-6"), "new": (None, "")}
    assert (evaluation.title, evaluation.runs, evaluation.rows, evaluation.same) == ("evaluation", (0, 1, 2), {}, 1)
    html = build_comparison(runs)
    assert "secret-" not in html
    assert "No run_config.yaml that can be read: c." in PageText(html).text


def test_the_page_of_two_curricula_holds_both_and_refers_to_nothing_outside(tmp_path):
    for name in ("one", "two"):
        write_curriculum(tmp_path / name / "demo", steps=3)
    evaluation = json.loads((tmp_path / "two" / "demo" / "evaluation.json").read_text())
    evaluation["checkpoints"][2]["files"]["image"]["accuracy"] = 0.6
    (tmp_path / "two" / "demo" / "evaluation.json").write_text(json.dumps(evaluation))
    page = PageText(build_comparison([read_run(tmp_path / name / "demo") for name in ("one", "two")]))
    assert "mgt rl two/demo 3 1 min 16 s 72.0 % 0.0 97.2 % 45.6 60.0 % −21.5 95.2 % 56.8" in page.text
    assert "one/demo reference 2026-01-31 09:00 UTC 3 156 2 min 56 s" in page.text
    assert "96 of the 96 logged rollouts" in page.text
    assert {member["run"] for member in page.data["series"]} == {"one/demo", "two/demo"}
    assert all(address.startswith("#") for address in page.addresses)
    assert "http://" not in page.html
    assert "https://" not in page.html


def test_names_of_runs_stages_and_settings_cannot_become_markup(tmp_path):
    runs = []
    for name in ("<b>a", "<b>b"):
        folder = tmp_path / name
        write_stage(folder, name="<b>fre", steps=1, seconds=1.0, hour=9)
        write_lines(folder / "metrics.jsonl", [{"step": 1, "<b>odd": 1.0}])
        write_lines(folder / "rollouts.jsonl", [rollout(step=1, response="</script><b>", scores={"<b>": 1.0})])
        (folder / "run_config.yaml").write_text(f"<b>key: {name}</b>\n")
        runs.append(read_run(folder))
    html = build_comparison(runs)
    assert "<b>a" not in html
    assert "<b>fre" not in html
    assert "<b>odd" not in html
    assert "<b>key" not in html
    assert html.count("</script>") == 3

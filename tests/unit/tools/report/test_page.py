import contextlib
import json
import os
import re

import pytest
from helpers.run_folders import PageText, rollout, scores, write_curriculum, write_lines, write_stage
from helpers.tables import table

from lmm_r1.cli.report import main
from lmm_r1.records.run_folder import RunFolder, read_run
from lmm_r1.tools.evaluation.page_parts import moment
from lmm_r1.tools.report import build_report, stage_rows, summarize, without_secrets, write_summary


def evaluation(**accuracies):
    return {
        "settings": {},
        "checkpoints": [
            {"name": name, "path": "", "files": {"text": scores(accuracy=accuracy, form=1.0, tokens=9.0)}}
            for name, accuracy in accuracies.items()
        ],
    }


@pytest.fixture
def curriculum(tmp_path):
    write_curriculum(tmp_path / "demo", steps=20)
    return read_run(tmp_path / "demo")


def test_the_page_shows_each_stage_with_its_change_over_the_one_that_it_began_with(curriculum):
    text = PageText(build_report(curriculum)).text
    assert "cold_start sft 150 23.4 s 53.5 % 95.4 % 41.9 31.0 % 88.9 % 46.7" in text
    changes = "70.5 % +17.0 since cold_start 97.0 % 45.3 36.0 % +5.0 since cold_start 89.5 % 47.7"
    assert f"fre rl 20 8 min 30 s {changes}" in text
    assert "mgt rl 20 8 min 30 s 72.0 % +1.5 since fre 97.2 % 45.6 81.5 % +45.5 since fre 95.2 % 56.8" in text
    assert "Held-out image accuracy 81.5 % +50.5 points since cold_start" in text
    assert "fre: text stage, Foundational Reasoning Enhancement; mgt: image stage," in text


def test_the_page_refers_to_nothing_outside_itself(curriculum):
    html = build_report(curriculum)
    assert all(address.startswith("#") for address in PageText(html).addresses)
    assert "default-src 'none'" in html
    assert "http://" not in html
    assert "https://" not in html


def test_the_page_says_how_many_of_how_many_rollouts_it_holds(curriculum):
    page = PageText(build_report(curriculum, max_rollouts=100))
    assert (
        "100 of the 320 logged rollouts are in this page, in whole groups spread evenly over the steps." in page.text
    )
    assert len(page.data["rollouts"]) == 100
    assert "0 of the 320 logged rollouts" in PageText(build_report(curriculum, max_rollouts=0)).text


@pytest.mark.parametrize(
    "nasty",
    [
        "</script><script>alert(1)</script><!-- & \u2028 \ud800, a bell \x07, a null \x00, reversed \u202etxet",
        "x" * 100_000,
        "<think>" * 20_000,
        "",
    ],
    ids=["markup", "long", "tags", "empty"],
)
def test_what_a_model_wrote_cannot_become_markup(nasty, tmp_path):
    write_stage(tmp_path, name="<b>fre</b>", steps=1, seconds=1.0, hour=9)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "<i>odd</i>": 1.0}])
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1, response=nasty, label="<b>", reward=float("nan"))])
    (tmp_path / "run_config.yaml").write_text("prompt: </pre><script>alert(2)</script>\n")
    html = build_report(read_run(tmp_path))
    assert html.count("</script>") == 3
    assert "<b>fre" not in html
    assert "<i>odd" not in html
    (record,) = PageText(html).data["rollouts"]
    assert (record["response"], record["label"], record["reward"]) == (nasty, "<b>", None)
    # The page's script builds elements from text, never from markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)


def test_the_settings_are_shown_without_credentials(curriculum):
    html = build_report(curriculum)
    assert "estimator: group_norm" in html
    assert "key: (hidden)" in html
    assert "0123456789abcdef" not in html


def test_only_credentials_are_hidden():
    text = (
        "logger:\n  wandb:\n    key: abc\n    key: null\nlogger.wandb.key: abc\nhf_token: 'x'\nmax_new_tokens: 96\n"
        "image_token: <image>\ninput_key: message\napi-key: z"
    )
    assert without_secrets(text).splitlines() == [
        "logger:",
        "  wandb:",
        "    key: (hidden)",
        "    key: null",
        "logger.wandb.key: (hidden)",
        "hf_token: (hidden)",
        "max_new_tokens: 96",
        "image_token: <image>",
        "input_key: message",
        "api-key: (hidden)",
    ]


def test_a_running_stage_torn_lines_and_repeated_steps_are_told(tmp_path):
    write_lines(tmp_path / "fre" / "metrics.jsonl", [{"step": 1, "kl": float("nan")}, {"step": 2}, {"step": 2}])
    with (tmp_path / "fre" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3')
    text = PageText(build_report(read_run(tmp_path))).text
    assert "fre stopped 2 0.0 s" in text
    assert "fre: 1 incomplete last line left out" in text
    assert "fre: steps logged more than once, as after a resume: 1;" in text
    assert "fre: values that are not finite, gaps in the curves: 1." in text
    assert "Not evaluated on held-out rows" in text
    assert "No rollouts were logged." in text


def test_an_evaluated_checkpoint_that_is_no_stage_keeps_its_place_in_the_table(tmp_path):
    write_stage(tmp_path / "fre", name="fre", steps=1, seconds=1.0, hour=9)
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation(base=0.25, fre=0.5, direct=0.625)))
    rows = stage_rows(read_run(tmp_path))
    found = [(row.name, row.began_with, row.held_out[0].change) for row in rows]
    assert found == [("base", None, None), ("fre", "base", 0.25), ("direct", None, None)]


def test_the_summary_holds_null_where_a_stage_was_not_evaluated(tmp_path):
    write_stage(tmp_path / "fre", name="fre", steps=4, seconds=10.5, hour=9)
    write_stage(tmp_path / "mgt", name="mgt", steps=6, seconds=20.0, hour=10)
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation(fre=0.5)))
    run = read_run(tmp_path)
    expected = [
        {"name": "fre", "text_accuracy": 0.5, "image_accuracy": None, "steps": 4},
        {"name": "mgt", "text_accuracy": None, "image_accuracy": None, "steps": 6},
    ]
    assert summarize(run) == {"seconds": 30.5, "stages": expected}
    write_summary(run, path=tmp_path / "summary.json", seconds=44.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"seconds": 44.0, "stages": expected}


@pytest.mark.parametrize(
    ("shares", "told"), table("report/page", "the_page_says_from_when_a_rule_judged_in_place_of_a_judge")
)
def test_the_page_says_from_when_a_rule_judged_in_place_of_a_judge(tmp_path, shares, told):
    lines = [{"step": step, "judged_by_rule": share} for step, share in enumerate(shares, start=1)]
    write_lines(tmp_path / "fre" / "metrics.jsonl", lines)
    text = PageText(build_report(read_run(tmp_path))).text
    assert all(sentence in text for sentence in told)
    assert text.count("the rule judged instead of the judge") + text.count("the judge gave no verdict") == len(told)


def test_the_page_says_of_an_unfinished_stage_whether_it_runs_or_was_stopped(tmp_path, capsys):
    """A cold start that is finished, and an RL stage in this process: it trains, then fails."""
    write_stage(tmp_path / "cold_start", name="cold_start", kind="sft", steps=5, seconds=1.0, hour=9)
    folder = RunFolder(path=tmp_path / "fre", name="fre", kind="rl")
    folder.open("")
    with contextlib.suppress(KeyboardInterrupt), folder.session():
        folder.metrics(3, {"reward": 0.5})
        page = PageText(build_report(read_run(tmp_path))).text
        assert "running when this page was written Results" in page
        assert "fre rl running 3" in page
        assert "fre was running when this page was written; make the page again to see the rest." in page
        raise KeyboardInterrupt
    (tmp_path / "fre" / "error.txt").write_text("Traceback")
    run = read_run(tmp_path)
    page = PageText(build_report(run)).text
    seen = moment(run.last_sign_at)
    assert f", stopped {seen} Results" in page
    assert "fre rl stopped 3" in page
    assert f"fre was stopped before its end; its last sign of life was at {seen}; its error is in error.txt." in page
    assert "running" not in page.replace("seen to run", "")
    main([str(tmp_path)])
    assert "fre (stopped): 3 steps, " in capsys.readouterr().out


def test_the_time_stays_right_when_a_page_is_made_again(tmp_path):
    """A day after its end, of a folder that was copied, by the command: what the stages took, 17 min 23 s."""
    write_curriculum(tmp_path / "demo", steps=20)
    for name in ("report.html", "again.html"):
        main([str(tmp_path / "demo"), "--output", str(tmp_path / name)])
        assert "Time 17 min 23 s 190 steps in 3 stages" in PageText((tmp_path / name).read_text()).text
        assert json.loads((tmp_path / "demo" / "summary.json").read_text())["seconds"] == pytest.approx(1043.4)
        for path in (tmp_path / "demo").rglob("*"):
            os.utime(path, (1_000_000, 1_000_000))

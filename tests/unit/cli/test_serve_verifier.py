import subprocess
import sys

import pytest
from helpers.tables import table

from lmm_r1.cli.serve_verifier import main
from remote_rm.answer_verifier import Weights
from remote_rm.box_verifier import BoxVerifier
from remote_rm.composition import Composition, part_from
from remote_rm.edit_distance_verifier import EditDistanceVerifier
from remote_rm.llm_judge_verifier import LlmJudge
from remote_rm.math_verifier import MathVerifier
from remote_rm.registry import VERIFIERS
from remote_rm.short_verifiers import ExactVerifier
from remote_rm.vqa_verifier import VqaVerifier


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list:
    """Collects what would be served, as (verifier, port)."""
    collected: list = []
    monkeypatch.setattr("remote_rm.service.app.serve", lambda verifier, args: collected.append((verifier, args.port)))
    return collected


@pytest.mark.parametrize(
    ("argv", "verifier", "port"),
    [
        (["math"], MathVerifier(), 5000),
        # As LMM-R1's server is started.
        (["math", "--disable-format-reward", "--port", "1"], MathVerifier(weights=Weights(format=0)), 1),
        (
            ["math", "--accuracy-weight", "2", "--format-weight=0.25", "--port", "0"],
            MathVerifier(weights=Weights(accuracy=2.0, format=0.25)),
            0,
        ),
        (
            ["exact", "--ignore_case", "--format_weight=0"],
            ExactVerifier(ignore_case=True, weights=Weights(format=0)),
            5000,
        ),
        (
            "llm_judge --judge_url http://h/v1 --judge-model=m --judge-rule choice --judge-concurrency=9".split(),
            LlmJudge(judge_url="http://h/v1", judge_model="m", judge_rule="choice", judge_concurrency=9),
            5000,
        ),
        (["box"], BoxVerifier(), 5000),
        (
            ["box", "--iou-threshold", "0.75", "--xywh", "--match-labels", "--format-weight=0"],
            BoxVerifier(iou_threshold=0.75, xywh=True, match_labels=True, weights=Weights(format=0)),
            5000,
        ),
        (["edit_distance", "--anls-threshold=1"], EditDistanceVerifier(anls_threshold=1.0), 5000),
        (
            ["vqa", "--accuracy-weight=0.5", "--soft-weight=0.5"],
            VqaVerifier(soft_weight=0.5, weights=Weights(accuracy=0.5)),
            5000,
        ),
        (["composition"], Composition(parts=(part_from("math=1.0"), part_from("format=0.5"))), 5000),
        (["math,format=0.5", "--port=1"], Composition(parts=(part_from("math"), part_from("format=0.5"))), 1),
        (
            ["composition", "--select", "choice", "--part", "format=0.5"],
            Composition(select=(part_from("choice"),), parts=(part_from("format=0.5"),)),
            5000,
        ),
    ],
)
def test_the_flags_make_the_verifier_that_is_served(argv, verifier, port, served):
    main(argv)
    assert served == [(verifier, port)]


@pytest.mark.parametrize(("argv", "told"), table("cli/serve_verifier", "a_bad_name_flag_or_value_ends_with_code_2"))
def test_a_bad_name_flag_or_value_ends_with_code_2(argv, told, served, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("name", VERIFIERS)
def test_the_help_of_every_verifier_shows_its_flags(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: lmm-r1 serve_verifier {name}" in shown
    assert ("--part" if name == "composition" else "--format-weight") in shown


@pytest.mark.parametrize("arguments", [["composition", "--help"], ["math", "--zzz"], ["zzz"]])
def test_help_and_refusals_load_neither_sympy_nor_the_http_stack(arguments):
    probe = (
        "import sys\n"
        "from lmm_r1.cli import main\n"
        f"try: main(['serve_verifier', *{arguments!r}])\n"
        "except SystemExit: pass\n"
        "loaded = {'sympy', 'fastapi', 'uvicorn', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, timeout=30)


def test_a_judge_that_cannot_be_asked_is_told_before_anything_is_served(tmp_path):
    flags = ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model=m", "--judge-folder", str(tmp_path), "--port=0"]
    with pytest.raises(
        SystemExit, match=r"^reward server: error: --judge-url http://127.0.0.1:9/v1: .* cannot be asked"
    ):
        main(["llm_judge", *flags])

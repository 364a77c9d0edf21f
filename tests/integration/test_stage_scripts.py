"""The stage scripts with a real reward service; only the training itself is played by a few lines of shell."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

STAGES = Path(__file__).parents[2] / "examples" / "scripts" / "lmm_r1"
WAIT_S = 60.0
# Asks the reward service that it is given for its health, finishes the stage, then lives on for TRAINING_S seconds.
TRAINING = """#!/usr/bin/env bash
set -euo pipefail
if [[ $1 != -m || $2 != lmm_r1.cli.* ]]; then exec "$REAL_PYTHON" "$@"; fi
echo "${@:2}" >>"$LOG"
while (($#)); do
  case $1 in
    --reward.remote_url) "$REAL_PYTHON" -c "$ASK" "${2%/get_reward}/health"; echo "$2" >"$LOG.url" ;;
    --ckpt.output_dir) mkdir -p "$2"; [[ -n ${TRAINING_S:-} ]] || echo '{}' >"$2/stage.json" ;;
  esac
  shift
done
exec sleep "${TRAINING_S:-0}"
"""
ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Variables for a script whose PYTHON plays the training and is the real one for everything else."""
    python = folder / "python"
    python.write_text(TRAINING, encoding="utf-8")
    python.chmod(0o755)
    fixed = {"PYTHON": str(python), "REAL_PYTHON": sys.executable, "LOG": str(folder / "log"), "ASK": ASK}
    rows = {"DATA": "rows.jsonl", "FRE_DATA": "text.jsonl", "MGT_DATA": "image.jsonl"}
    return {"PATH": os.environ["PATH"], "TMPDIR": str(folder)} | fixed | rows | variables


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(STAGES / script)],
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.read_text(encoding="utf-8").endswith("\n")):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text(encoding="utf-8").strip()


def is_gone(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2)
    except urllib.error.URLError:
        return True
    return False


def test_a_curriculum_trains_evaluates_and_reports_with_one_reward_service(tmp_path):
    data = {"SFT_DATA": "sft.jsonl", "EVAL_TEXT": "text.jsonl", "ROOT": "runs"}
    done = run("run_curriculum.sh", tmp_path, **data)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    started = [line.split()[0].removeprefix("lmm_r1.cli.") for line in lines]
    assert started == ["train_sft", "train_ppo_ray", "train_ppo_ray", "evaluate", "report"]
    url = (tmp_path / "log.url").read_text(encoding="utf-8").strip()
    assert url in lines[1]
    assert url in lines[2]
    assert is_gone(url.replace("get_reward", "health"))
    assert {path.name for path in tmp_path.iterdir()} == {"python", "log", "log.url", "runs"}


def test_the_same_command_again_skips_the_finished_stages(tmp_path):
    for _ in range(2):
        assert run("run_curriculum.sh", tmp_path, ROOT="runs", REWARD_URL="").returncode == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert [line.split()[0].removeprefix("lmm_r1.cli.") for line in lines] == [
        *("train_ppo_ray", "train_ppo_ray", "report"),
        "report",
    ]


def group_ends(group: int) -> bool:
    """Whether the process group empties soon; the pool's fork server ends just after the service that it served."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_stopped_stage_leaves_neither_training_nor_reward_service_behind(tmp_path):
    script = subprocess.Popen(
        ["bash", str(STAGES / "train_fre_text.sh")],
        cwd=tmp_path,
        env=environment(tmp_path, TRAINING_S="600"),
        start_new_session=True,
    )
    try:
        url = wait_for(tmp_path / "log.url")
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=WAIT_S) == 143
        assert is_gone(url.replace("get_reward", "health"))
        assert group_ends(script.pid), "a process of the script is still running"
    finally:
        script.kill()


def test_a_failing_stage_fails_the_script(tmp_path):
    done = run("train_fre_text.sh", tmp_path, REWARD_URL="http://127.0.0.1:9/get_reward")
    assert done.returncode == 1
    assert not (tmp_path / "runs").exists()


def test_a_reward_service_that_does_not_start_is_shown(tmp_path):
    done = run("train_fre_text.sh", tmp_path, REAL_PYTHON="/bin/false")
    assert done.returncode == 1
    assert "the reward service did not start" in done.stderr
    assert not (tmp_path / "log").exists()

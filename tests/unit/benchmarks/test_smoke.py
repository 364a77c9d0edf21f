"""How figures of a GPU are judged by those of a CPU, and what becomes of commands that hang or leave processes."""

import gpu_smoke
import pytest
from gpu_stages.terminal import CommandFailed, Terminal
from helpers.tables import table


def terminal(path, *, limit_s=60.0):
    made = Terminal(path / "stage", limit_s=limit_s)
    made.folder.mkdir()
    return made


def is_alive(pid):
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("value", "reference", "tolerance", "difference", "ok"),
    table("benchmarks/smoke", "a_figure_is_right_within_its_tolerance"),
)
def test_a_figure_is_right_within_its_tolerance(value, reference, tolerance, difference, ok):
    judged = gpu_smoke.compared(value, reference, tolerance)
    assert judged["ok"] is ok
    assert difference is None or judged["difference"] == pytest.approx(difference)


def test_the_summary_tells_what_passed_failed_and_was_not_run():
    figures = {
        "train_sft": {"loss/1": gpu_smoke.figure(2.001, tolerance=1e-3)},
        "train_dpo": {"loss/1": gpu_smoke.figure(2.1, tolerance=1e-3)},
        "rl_lora": {"steps": gpu_smoke.figure([1], tolerance=0, expected=[1, 2])},
    }
    results = {name: {"figures": entry} for name, entry in figures.items()}
    results |= {"rl_fp16": {"needs": "a GPU"}, "demo": {"error": "CommandFailed: ..."}}
    reference = {"stages": {"commands": {"results": {n: {"figures": {"loss/1": {"value": 2.0}}} for n in figures}}}}
    content = {"stages": {"commands": {"results": results}}}
    gpu_smoke.judge(content, reference)
    summary = content["summary"]
    assert (summary["passed"], summary["failed"]) == (["train_sft"], ["train_dpo", "rl_lora", "demo"])
    assert summary["not_run"][0] == "rl_fp16"
    assert set(summary["passed"] + summary["failed"] + summary["not_run"]) == set(gpu_smoke.STAGES)
    loss = results["train_dpo"]["figures"]["loss/1"]
    assert (loss["reference"], loss["ok"]) == (2.0, False)
    assert loss["difference"] == pytest.approx(0.1)


def test_a_command_is_killed_with_processes_that_left_its_group(tmp_path):
    stage = terminal(tmp_path)
    pid = stage.folder / "pid"
    stage.run("bash -c 'setsid sleep 600 & echo $! > pid; wait'", until=lambda: pid.exists() and pid.read_text() != "")
    assert not is_alive(int(pid.read_text()))
    assert stage.printed == [0]


def test_what_a_command_leaves_running_is_killed_when_it_has_ended(tmp_path):
    stage = terminal(tmp_path)
    stage.run("bash -c 'setsid sleep 600 & echo $! > pid; echo done'")
    assert not is_alive(int((stage.folder / "pid").read_text()))
    assert stage.printed == [1]


def test_a_command_that_hangs_ends_with_the_stages_time(tmp_path):
    stage = terminal(tmp_path, limit_s=0)
    with pytest.raises(CommandFailed, match="`sleep 600` was not done within the stage's 0 s"):
        stage.run("sleep 600")


def test_a_failing_command_is_reported_with_the_end_of_its_output(tmp_path):
    stage = terminal(tmp_path)
    with pytest.raises(CommandFailed, match=r"ended with code 3: one \| two"):
        stage.run("bash -c 'echo one; echo two; exit 3'")


def test_a_server_is_asked_and_must_end_by_the_signal_as_it_should(tmp_path, monkeypatch):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    stage = terminal(tmp_path)
    with stage.serving(f"python3 {script}") as address:
        assert stage.ask(address, {"a": 1}) == {"got": {"a": 1}}
    monkeypatch.setenv("CODE", "4")
    with pytest.raises(CommandFailed, match="ended with code 4: "), stage.serving(f"python3 {script}"):
        pass


SERVER = """
import http.server, json, os, signal, sys

class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"got": body}).encode())

    def log_message(self, *given):
        pass

signal.signal(signal.SIGTERM, lambda *given: os._exit(int(os.environ.get("CODE", "143"))))
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Echo)
with open(sys.argv[sys.argv.index("--port-file") + 1], "w") as stream:
    stream.write(str(server.server_port))
server.serve_forever()
"""


def test_without_a_reference_a_figure_is_neither_right_nor_wrong():
    assert gpu_smoke.compared(1.0, None, 0.1) == {"difference": None, "ok": None}

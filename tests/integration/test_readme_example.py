"""The example of README.md trains, with a tiny model in the place of the released one and short responses."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

PAGE = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
MODEL, FOLDER = '"HuggingFaceTB/SmolVLM2-256M-Video-Instruct"', 'output="runs/sums"'


def test_the_example_trains(tiny_checkpoint, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert code.count(MODEL) == code.count(FOLDER) == 1
    short = f"{FOLDER}, max_new_tokens=8"
    code = code.replace(MODEL, repr(str(tiny_checkpoint("smolvlm")))).replace(FOLDER, short)
    script = tmp_path / "example.py"
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(code, '    ')}    print(run.steps, run.folder)\n")
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps, folder = ended.stdout.splitlines()[-1].split()
    assert int(steps) > 1
    assert folder == "runs/sums"
    assert (tmp_path / folder / "config.json").is_file()

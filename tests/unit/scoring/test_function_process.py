"""A user's function runs in the main thread of a process of its own, with one event loop for the whole run."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.conversations import message, row

from lmm_r1.config.rewards import RewardFunction
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.functions import FunctionScorer

HALF = r"\frac{1}{2}"
ROW = row(message("user", "What is 1/2?"), answer=HALF)
BATCH = [
    ScoredResponse(row=ROW, prompt="p", query=f"p{text}", response=text, num_tokens=3)
    for text in (rf"\boxed{{{HALF}}}", f"${HALF}$")
]
LIMIT = """
import signal

def _late(number, frame):
    raise TimeoutError

def reward_func(queries, prompts, labels, responses):
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            pass
    except TimeoutError:
        return [1.0 for _ in responses]
"""
VERIFIED = """
from math_verify import parse, verify

def accuracy_reward(completions, **kwargs):
    try:
        return [float(verify(parse("$\\\\frac{1}{2}$"), parse(one[0]["content"]))) for one in completions]
    except Exception:
        return [0.0 for _ in completions]
"""
ONE_LOOP = """
import asyncio

LOOP = asyncio.get_event_loop()
BOTH = asyncio.Semaphore(2)
HERE = 0

async def reward_func(queries, prompts, labels, responses):
    global HERE
    assert asyncio.get_running_loop() is LOOP
    async with BOTH:
        HERE += 1
        while HERE < 2:
            await asyncio.sleep(0.01)
        return [1.0 for _ in responses]
"""
OWN_USE = """
import asyncio

async def _judge(text):
    await asyncio.sleep(0)
    return 1.0

def reward_func(queries, prompts, labels, responses):
    loop = asyncio.get_event_loop()
    made = loop.run_until_complete(asyncio.gather(*map(_judge, responses)))
    {after}
    return made
"""
LATER = """
class Later:
    async def __call__(self, responses):
        return [1.0 for _ in responses]

judge = Later()
def reward_func(queries, prompts, labels, responses):
    return judge(responses)
"""
MATHRULER = """
from mathruler.grader import extract_boxed_content, grade_answer

def compute_score(reward_inputs):
    boxed = [extract_boxed_content(one["response"]) for one in reward_inputs]
    assert boxed == ["\\\\frac{1}{2}", "None"], boxed
    right = [grade_answer(one, reward_inputs[0]["ground_truth"]) for one in ("0.5", "3", "None", "1/2")]
    assert right == [True, False, False, True], right
    return [{"overall": 1} for _ in reward_inputs]
"""


def scorer(folder: Path, code: str, *, deadline_s: float = 60.0) -> FunctionScorer:
    path = folder / "math.py"
    path.write_text(code)
    return FunctionScorer(
        RewardFunction(path=str(path), name=None, arguments={}, score_key=None, deadline_s=deadline_s)
    )


async def two_groups(source: FunctionScorer) -> list[float]:
    groups = await asyncio.gather(source.rewards(BATCH), source.rewards(BATCH))
    return [score.reward for group in groups for score in group]


@pytest.mark.parametrize(
    "code",
    [
        LIMIT,
        VERIFIED,
        ONE_LOOP,
        OWN_USE.format(after=""),
        OWN_USE.format(after="asyncio.run(asyncio.sleep(0))"),
        OWN_USE.format(after="loop.close()"),
        LATER,
        MATHRULER,
        "import neighbour\n\ndef reward_func(queries, prompts, labels, responses):\n    return neighbour.ONES",
        "def reward_func(queries, prompts, labels, responses):\n    return print('seen', input) or [1.0, 1.0]",
    ],
)
def test_it_may_do_what_it_may_do_in_the_main_thread_of_a_trainer(tmp_path, code):
    (tmp_path / "neighbour.py").write_text("ONES = [1.0, 1.0]\n")
    assert asyncio.run(two_groups(scorer(tmp_path, code))) == [1.0] * 4


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(3)", "math.py: the reward function: its process ended with exit code 3; a function must return"),
        ("ctypes.string_at(0)", r"its process was killed by signal 11 \(Segmentation fault\); stderr says where"),
        ("os.kill(os.getpid(), 9)", r"killed by signal 9 \(Killed\); the machine may be out of memory"),
        ("sys.exit('over')", "math.py, line 4: the reward function raised SystemExit: over"),
        ("import flash_judge", "math.py, line 4: .*No module named 'flash_judge'; install it .*flash-judge"),
    ],
)
def test_however_it_ends_the_message_says_so_to_all_groups(tmp_path, body, said):
    code = f"import ctypes, os, sys\n\ndef reward_func(queries, prompts, labels, responses):\n    {body}\n"
    source = scorer(tmp_path, code)
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            asyncio.run(two_groups(source))


@pytest.mark.parametrize(
    "body",
    [
        # C code that holds Python's lock.
        "re.match('(a+)+b', 'a' * 64)",
        "[signal.signal(one, signal.SIG_IGN) for one in (2, 10, 14, 15)]; subprocess.run(['sleep', '1000'])",
    ],
)
def test_one_that_cannot_be_interrupted_is_killed_at_its_deadline_with_what_it_has_started(tmp_path, body):
    code = (
        f"import re, signal, subprocess\n\ndef reward_func(queries, prompts, labels, responses):\n    {body}\n"
        "    return [1.0, 1.0]\n"
    )
    source = scorer(tmp_path, code, deadline_s=1.0)
    (process,) = [
        one for one in psutil.Process().children() if str(source._process._link._process.pid) == str(one.pid)
    ]
    with pytest.raises(
        UserError, match="not returned the rewards of 2 responses within 1 s.* raise --reward.deadline_s"
    ):
        asyncio.run(two_groups(source))
    assert not process.is_running()
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "1000"]]


def test_it_ends_with_the_process_that_has_started_it_whatever_it_does(tmp_path):
    told = tmp_path / "pid"
    code = (
        "import os, re\n\ndef reward_func(queries, prompts, labels, responses):\n"
        f"    open({str(told)!r}, 'w').write(str(os.getpid()))\n    re.match('(a+)+b', 'a' * 64)\n"
    )
    (tmp_path / "math.py").write_text(code)
    starting = (
        "import asyncio; from test_function_process import *\n"
        f"source = FunctionScorer(RewardFunction(path={str(tmp_path / 'math.py')!r}, name=None, arguments={{}}, "
        "score_key=None, deadline_s=600))\nasyncio.run(two_groups(source))"
    )
    paths = os.pathsep.join(str(Path(__file__).parents[up]) for up in (0, 2, 3))
    started = subprocess.Popen([sys.executable, "-c", starting], env=os.environ | {"PYTHONPATH": paths})
    until = time.monotonic() + 120
    while not (told.exists() and told.read_text()):
        assert started.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    process = psutil.Process(int(told.read_text()))
    started.kill()
    started.wait()
    process.wait(timeout=30)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\n\nsys.exit('used alone')\n", r"\(SystemExit: used alone\); correct it, see .*math.py, line 3$"),
        ("import cv9_x\n", r"No module named 'cv9_x'\); correct it, see .*, line 1; install it .* pip install cv9-x$"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_by_line(tmp_path, code, said):
    with pytest.raises(UserError, match=f"math.py: the file cannot be imported .*{said}"):
        scorer(tmp_path, code)

"""The garbage collector looks seldom while libraries are loaded, as usual after it, and never again at what they hold."""

import gc
import subprocess
import sys

PROGRAM = """
import gc
usual = gc.get_threshold()
from lmm_r1 import quiet
quiet.begin_loading()
assert gc.get_threshold()[0] > 10 * usual[0]
held = [[] for _ in range(1000)]
quiet.done_loading()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 1000
class Told:
    def __del__(self):
        print("collected")
told = Told()
told.itself = told
del told
gc.collect()
print("ended")
"""


def test_garbage_of_later_is_collected_and_nothing_stays_frozen_at_the_end():
    program = "import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n" + PROGRAM
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.split("\n")[:3] == ["collected", "ended", "frozen 0"]


def test_a_second_model_in_one_process_finds_the_usual_settings_again():
    from lmm_r1 import quiet

    before = gc.get_threshold()
    try:
        for _ in range(2):
            quiet.begin_loading()
            quiet.done_loading()
            assert gc.get_threshold() == quiet._USUAL
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

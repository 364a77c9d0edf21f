import subprocess
import sys

import pytest

from remote_rm.exact_verifier import ExactVerifier
from remote_rm.registry import VERIFIERS, get_verifier

pytestmark = pytest.mark.unit


def test_a_verifier_is_made_with_its_settings():
    assert get_verifier("exact", ignore_case=True) == ExactVerifier(ignore_case=True)


def test_an_unknown_name_is_told_with_the_nearest_and_all_known_ones():
    with pytest.raises(ValueError, match=r"unknown verifier 'chioce'; did you mean choice\?") as raised:
        get_verifier("chioce")
    assert str(raised.value).endswith(f"Known are {', '.join(VERIFIERS)}")


def test_a_name_like_no_other_is_told_without_a_guess():
    with pytest.raises(ValueError, match="unknown verifier 'zzz'; Known are math"):
        get_verifier("zzz")


def test_no_verifier_loads_sympy_or_the_http_stack_when_it_is_made():
    probe = (
        "import sys\n"
        "from remote_rm.registry import VERIFIERS, get_verifier\n"
        "assert not [name for name in sys.modules if name.endswith('_verifier')]\n"
        "[get_verifier(name) for name in VERIFIERS]\n"
        "sys.exit(str({'sympy', 'fastapi', 'uvicorn', 'pydantic', 'torch', 'lmm_r1'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=30)
    assert done.stderr.strip() == ""

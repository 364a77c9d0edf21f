import pytest

from lmm_r1.errors import UserError
from lmm_r1.scoring.sources import VerifierJudge


def test_a_judge_that_cannot_be_asked_is_a_user_error(tmp_path):
    spec = f"llm_judge:judge_url=http://127.0.0.1:9/v1,judge_model=m,judge_folder={tmp_path}"
    with pytest.raises(
        UserError, match="^--judge-url http://127.0.0.1:9/v1: .* cannot be asked: .*; start the server or"
    ):
        VerifierJudge(spec, workers=1, item_timeout_seconds=1.0).__enter__()

"""Which kits a backend takes."""

import pytest
from helpers.tiny_models import altered

from lmm_r1.errors import UserError
from lmm_r1.generation.engine import FINE_TUNE, check_backend
from lmm_r1.lmm_kits import get_kit

KIT = get_kit("llm")
WITHOUT_ENGINE = altered(KIT, engine_refusal="it has no class for it")


def test_a_kit_without_an_engine_is_refused_with_its_reason_and_what_it_can_do():
    check_backend("vllm", KIT, model="--actor.model_name_or_path m", instead=FINE_TUNE)
    with pytest.raises(UserError, match=r"--actor.model_name_or_path m: .*no class.*train_sft"):
        check_backend("vllm", WITHOUT_ENGINE, model="--actor.model_name_or_path m", instead=FINE_TUNE)


def test_outside_of_training_plain_transformers_takes_such_a_kit():
    with pytest.raises(UserError, match=r"--model m: .*no class.*--eval_task generate, --backend transformers"):
        check_backend("vllm", WITHOUT_ENGINE, model="--model m")
    check_backend("transformers", WITHOUT_ENGINE, model="--model m")

import pickle

import pytest
from helpers.tiny_models import altered

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, checkpoint, get_kit

pytestmark = pytest.mark.unit


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the kit that every checkpoint has here, in order."""
    calls: list[str] = []

    def answer(name: str) -> object:
        def method(self: object, path: str, *, trust_remote_code: bool) -> str:
            calls.append(f"{name} {path} {trust_remote_code}")
            return name

        return method

    names = ("load_config", "load_processor")
    kit = altered(
        get_kit("llm"),
        **{name: answer(name) for name in names},
        tokenizer_of=lambda self, processor: f"tokenizer of {processor}",
        banned_token_ids=lambda self, config, tokenizer: (config, tokenizer),
    )
    monkeypatch.setattr(checkpoint, "kit_of", lambda path, *, trust_remote_code: kit)
    return calls


def test_parts_are_loaded_when_asked_for_and_once(asked):
    model = Checkpoint("some/model", trust_remote_code=True)
    assert model.kit.model_type == "llm"
    assert asked == []
    assert model.tokenizer == "tokenizer of load_processor"
    assert asked == ["load_processor some/model True"]
    assert model.processor == "load_processor"
    assert model.config == "load_config"
    assert model.banned_token_ids == ("load_config", "tokenizer of load_processor")
    assert asked == ["load_processor some/model True", "load_config some/model True"]


def test_code_of_a_checkpoint_is_not_run_unless_asked_for(asked):
    assert Checkpoint("m").processor
    assert asked == ["load_processor m False"]


def test_two_of_one_path_are_equal_whatever_was_loaded(asked):
    loaded = Checkpoint("m")
    assert loaded.config
    assert loaded == Checkpoint("m")
    assert loaded != Checkpoint("m", trust_remote_code=True)


def test_it_loads_what_its_kit_loads(tiny_checkpoint):
    path = str(tiny_checkpoint("llm"))
    model = Checkpoint(path)
    assert model.kit is get_kit("llm")
    assert model.banned_token_ids == model.kit.banned_token_ids(model.config, model.tokenizer)
    assert pickle.loads(pickle.dumps(model)) == model


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        _ = Checkpoint(str(tmp_path)).processor

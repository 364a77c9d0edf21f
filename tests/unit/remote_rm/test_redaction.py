"""Secrets in settings, records, messages and logs: by the names of keys, and in addresses."""

import io
import json
import logging
import pickle
import unicodedata

import pytest
import yaml

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, to_yaml
from lmm_r1.config.resolve import check_not_hidden, settings_of_the_run
from lmm_r1.errors import UserError
from lmm_r1.train.start import Fingerprint
from remote_rm import redaction
from remote_rm.client import RewardUnavailable
from remote_rm.redaction import HIDDEN, hidden_settings, hidden_text, is_secret, neutral

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "name", ["logger.wandb.key", "apiKey", "X-Api-Key", "judge_api_key", "hf_token", "Authorization", "client_secret"]
)
def test_a_name_of_a_secret(name):
    assert is_secret(name)
    assert hidden_settings({name: SECRET}) == {name: HIDDEN}
    assert SECRET not in hidden_text(f"{name}={SECRET}") or name == "logger.wandb.key"


@pytest.mark.parametrize(
    "name", ["input_key", "label_key", "image_token", "max_tokens", "score_key", "token_env", "prompt_template"]
)
def test_a_name_of_no_secret(name):
    assert not is_secret(name)
    assert hidden_settings({name: "message"}) == {name: "message"}


CONFIG = dotted.replace(
    PPOConfig(),
    {
        "actor.model_name_or_path": "model",
        "data.prompt_dataset": "rows.jsonl",
        "data.prompt_template": "Say key: value, with a token: {{ content }}",
        "reward.remote_url": f"http://me:{SECRET}@host/get_reward?k={SECRET},http://other/get_reward",
        "reward.function_kwargs": json.dumps({"weight": 0.5, "headers": {"Authorization": f"Bearer {SECRET}"}}),
        "agent.options": json.dumps({"api_key": SECRET, "url": f"https://u:{SECRET}@host/a?b={SECRET}"}),
        "logger.wandb.key": SECRET,
    },
)


def test_run_config_has_no_secret_and_says_so_if_it_is_read_back():
    text = to_yaml(CONFIG)
    assert SECRET not in text
    kept = yaml.safe_load(text)
    assert kept["reward"]["remote_url"] == f"http://{HIDDEN}@host/get_reward?{HIDDEN},http://other/get_reward"
    assert json.loads(kept["reward"]["function_kwargs"]) == {"weight": 0.5, "headers": {"Authorization": HIDDEN}}
    assert kept["data"]["prompt_template"] == "Say key: value, with a token: {{ content }}"
    assert CONFIG.reward.function_kwargs is not None
    assert SECRET in CONFIG.reward.function_kwargs, "the run itself has it"
    with pytest.raises(UserError, match=r"--agent.options holds \(hidden\): run_config.yaml has no secrets"):
        check_not_hidden(dotted.replace(PPOConfig(), {"agent.options": kept["agent"]["options"]}))


def test_the_settings_next_to_checkpoints_have_no_secret_and_a_new_key_is_no_other_run():
    settings = settings_of_the_run(CONFIG)
    assert SECRET not in json.dumps(settings)
    renewed = dotted.replace(CONFIG, {"agent.options": CONFIG.agent.options.replace(SECRET, "another")})
    assert settings_of_the_run(renewed)["agent.options"] == settings["agent.options"]
    before = Fingerprint(models={}, rows={}, settings={**settings, "agent.options": CONFIG.agent.options})
    assert Fingerprint(models={}, rows={}, settings=settings).differences(before) == []


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@host/get_reward did not answer",
        f"cannot read the image https://host/a.png?X-Amz-Signature={SECRET}&e=1: 403",
        f"ValueError: {{'openai_api_key': '{SECRET}'}}",
        f'{{"api_key": "{SECRET}"}}',
        f"Authorization: Bearer {SECRET}",
        f"curl -H 'X-Api-Key: {SECRET}'",
        f"the key Bearer {SECRET} is not known",
        f"postgresql://me:{SECRET}@db/rows",
        f"llm_judge:judge_url=http://a:{SECRET}@h/v1,judge_model=m",
        f"https://h/v1?access_token={SECRET}#part",
    ],
)
def test_messages_errors_and_logs_have_no_secret(text, monkeypatch):
    assert SECRET not in hidden_text(text)
    for error in (UserError(text), RewardUnavailable(text)):
        assert SECRET not in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    redaction.hide_in_logs()
    stream = io.StringIO()
    logger = logging.Logger("a_test")
    logger.addHandler(logging.StreamHandler(stream))
    logger.warning("said %s", text)
    assert stream.getvalue().startswith("said ")
    assert SECRET not in stream.getvalue()


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x08d\x7fe\x9b2Jf\u202eg\ud800h\ti\n"
HARMLESS = "a␛[31mb␛]0;title␇c␍␈d␡e\\x9b2Jf\\u202eg\ufffdh\ti\n"


def test_control_characters_of_rows_and_replies_are_shown_and_not_obeyed(monkeypatch):
    assert neutral(HOSTILE) == HARMLESS
    left = [
        character for character in map(chr, (*range(0x300), *range(0xD700, 0xE100))) if neutral(character) == character
    ]
    assert [character for character in left if unicodedata.category(character) in ("Cc", "Cs")] == ["\t", "\n"]
    for error in (UserError(HOSTILE), RewardUnavailable(HOSTILE)):
        assert str(error) == str(UserError(str(error))) == HARMLESS
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    redaction.hide_in_logs()
    for name, shown in (("lmm_r1.data", "␛[1m"), ("vllm", "\x1b[1m")):
        assert logging.Logger(name).makeRecord(name, 30, "", 1, "%s", ("\x1b[1m",), None).getMessage() == shown


@pytest.mark.parametrize(
    "text",
    [
        "rows.jsonl line 7: no image file a.png; relative paths start at the row file's folder, or at --data.image_dir",
        "http://127.0.0.1:5000/get_reward answered 503: try again",
        "--train.max_tokens_per_gpu 16192: a token: of 3",
        "the secret of the method is simple",
    ],
)
def test_other_messages_are_unchanged(text):
    assert hidden_text(text) == text

import json
import logging
from pathlib import Path

import pytest

from remote_rm.service import middleware as access_log
from remote_rm.service.middleware import MAX_TEXT_CHARS, RequestRecord, RolloutSampler, log_request, open_access_log
from remote_rm.verifier import Item, Score


def batch(*responses: str) -> tuple[list[Item], list[Score]]:
    items = [Item(prompt="p", response=response, label="1") for response in responses]
    return items, [Score(reward=1.5, score=1.0, parts={"accuracy": 1.0}) for _ in responses]


def test_every_third_item_is_taken_across_requests():
    sampler = RolloutSampler(1 / 3)
    taken = [
        [rollout["response"] for rollout in sampler.rollouts(*batch(*group))] for group in ("ab", "c", "", "defg", "h")
    ]
    assert taken == [["a"], [], [], ["d", "g"], []]


def test_a_share_of_zero_takes_none_and_of_one_takes_all():
    assert RolloutSampler(0.0).rollouts(*batch("a", "b")) == []
    assert len(RolloutSampler(1.0).rollouts(*batch("a", "b"))) == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="from 0 to 1"):
        RolloutSampler(share)


def test_a_rollout_shows_the_sample_and_its_score():
    (rollout,) = RolloutSampler(1.0).rollouts(*batch("r"))
    assert rollout == {
        "prompt": "p",
        "response": "r",
        "label": "1",
        "reward": 1.5,
        "score": 1.0,
        "parts": {"accuracy": 1.0},
        "timed_out": False,
    }


def test_a_long_text_is_logged_without_its_middle():
    text = "a" * MAX_TEXT_CHARS + "b" * 10
    (rollout,) = RolloutSampler(1.0).rollouts(*batch(text))
    half = MAX_TEXT_CHARS // 2
    assert rollout["response"] == "a" * half + " [10 characters left out] " + "a" * (half - 10) + "b" * 10


def test_a_request_is_one_line_of_json_whatever_it_holds(caplog):
    record = RequestRecord(
        method="POST", path="/get_reward", client="127.0.0.1:9", status=200, seconds=0.0123, items=2
    )
    record.rollouts = RolloutSampler(1.0).rollouts(*batch("two\nlines \u2028\ud800\0"))
    with caplog.at_level(logging.INFO, logger="remote_rm.service.middleware"):
        log_request(record)
    (message,) = caplog.messages
    assert message.isascii()
    assert "\n" not in message
    line = json.loads(message)
    assert (line["status"], line["items"], line["ms"], line["client"]) == (200, 2, 12.3, "127.0.0.1:9")
    assert line["time"].endswith("+00:00")
    assert line["rollouts"][0]["response"] == "two\nlines \u2028\ud800\0"


def test_a_log_on_a_full_disk_is_told_once_and_holds_up_no_request(monkeypatch, capsys):
    logger = access_log.logger
    for name, value in {"handlers": [], "propagate": True, "level": logger.level}.items():
        monkeypatch.setattr(logger, name, value)
    told: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("remote_rm.service"), "warning", lambda text, *values: told.append(text % values)
    )
    open_access_log(Path("/dev/full"))
    for _ in range(3):
        log_request(
            RequestRecord(method="POST", path="/get_reward", client="127.0.0.1:9", status=200, seconds=0.1, items=2)
        )
    assert told == [
        "--access-log /dev/full cannot be written (No space left on device): lines are missing until there is room; "
        "requests are answered"
    ]
    assert capsys.readouterr().err == ""

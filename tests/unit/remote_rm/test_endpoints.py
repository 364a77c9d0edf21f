import time

import pytest

from remote_rm.client import MAX_PAUSE_SECONDS, EndpointRota

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which stands still; the pauses are of their full length."""
    now = [1000.0]
    monkeypatch.setattr("remote_rm.client.time.monotonic", lambda: now[0])
    monkeypatch.setattr("remote_rm.client.random.uniform", lambda _low, high: high)
    return now


def fail(rota: EndpointRota, address: str, *, asked_at: float, **more: float) -> None:
    (endpoint,) = (endpoint for endpoint in rota.endpoints if endpoint.address == address)
    rota.failed(endpoint, asked_at=asked_at, reason="down", **more)


def taken(rota: EndpointRota, count: int) -> str:
    return "".join(endpoint.address if endpoint else "-" for endpoint in (rota.take() for _ in range(count)))


def test_those_that_are_well_are_taken_in_turn(clock):
    assert taken(EndpointRota("abc"), 7) == "abcabca"


def test_one_that_failed_is_passed_over_then_tried_once_per_pause(clock):
    rota = EndpointRota("ab")
    fail(rota, "a", asked_at=clock[0])
    assert taken(rota, 3) == "bbb"
    clock[0] += 0.2
    assert taken(rota, 4) == "abbb"
    clock[0] += 0.2
    assert taken(rota, 3) == "abb"


def test_one_that_is_back_takes_its_turn_again(clock):
    rota = EndpointRota("ab")
    fail(rota, "a", asked_at=clock[0])
    rota.succeeded(rota.endpoints[0])
    assert taken(rota, 4) == "abab"


def test_pauses_double_up_to_their_limit(clock):
    rota = EndpointRota("a")
    pauses = []
    for _ in range(7):
        fail(rota, "a", asked_at=clock[0])
        pauses.append(round(rota.seconds_to_wait(), 6))
        clock[0] += 100
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]


def test_failures_of_requests_under_way_together_count_once(clock):
    rota = EndpointRota("a")
    asked_at = clock[0]
    clock[0] += 1
    for _ in range(50):
        fail(rota, "a", asked_at=asked_at)
    assert rota.endpoints[0].failures == 1
    assert rota.seconds_to_wait() == pytest.approx(0.2)
    assert taken(rota, 2) == "--"


def test_a_server_is_left_alone_for_as_long_as_it_asked(clock):
    rota = EndpointRota("a")
    fail(rota, "a", asked_at=clock[0], retry_after_seconds=7.0)
    clock[0] += 6.9
    assert taken(rota, 1) == "-"
    clock[0] += 0.2
    assert taken(rota, 2) == "a-"


def test_times_are_those_of_the_monotonic_clock():
    rota = EndpointRota("a")
    fail(rota, "a", asked_at=time.monotonic())
    assert 0 < rota.seconds_to_wait() <= 0.2

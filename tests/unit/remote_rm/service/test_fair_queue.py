import pytest

from remote_rm.service.pool import FairQueue


def popped(queue: FairQueue[str], count: int) -> str:
    return "".join(queue.pop() for _ in range(count))


def test_requests_take_turns():
    queue = FairQueue[str]()
    queue.add("aaa")
    queue.add("bb")
    queue.add("c")
    assert len(queue) == 6
    assert popped(queue, 6) == "abcaba"
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()
    assert len(queue) == 0


def test_a_new_request_is_begun_before_others_go_on():
    queue = FairQueue[str]()
    queue.add("a" * 5)
    queue.add("b" * 5)
    assert popped(queue, 3) == "aba"
    queue.add("c")
    assert popped(queue, 3) == "cba"


def test_new_requests_without_end_do_not_starve_those_begun():
    queue = FairQueue[str]()
    queue.add("abc")
    assert popped(queue, 1) == "a"
    for number in range(9):
        queue.add(str(number))
    # "a" was one of three firsts in a row.
    assert popped(queue, 11) == "01b234c5678"


def test_what_is_put_back_is_next_and_what_is_dropped_is_gone():
    queue = FairQueue[str]()
    first, second = queue.add("abc"), queue.add("xyz")
    item = queue.pop()
    queue.put_back(item)
    assert len(queue) == 6
    assert popped(queue, 2) == "ax"
    queue.drop(first)
    queue.drop(first)
    assert len(queue) == 2
    assert list(queue.clear()) == ["y", "z"]
    queue.drop(second)
    assert len(queue) == 0

"""Budget forcing by hand: which ids stay, what is appended, and when a turn is over. Tokens are characters, or pairs of them."""

from collections.abc import Sequence

import pytest

from lmm_r1.agents.environment import TurnOptions
from lmm_r1.config.shared import ThoughtConfig
from lmm_r1.errors import UserError
from lmm_r1.generation.request import Response
from lmm_r1.generation.turns import TurnPieces, tokens_before

END = 1
# A token of two characters, the first of which is not part of the end of a thought.
DOT_OPEN = 256
PIECES = {END: "<end>", DOT_OPEN: ".<"}


def text_of(ids: Sequence[int]) -> str:
    return "".join(PIECES.get(token, chr(token)) for token in ids)


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def turn(*, room: int = 40, stops: tuple[str, ...] = (), **thought: object) -> TurnPieces:
    forced = ThoughtConfig(end="</t>", **thought)
    return TurnPieces(own_stops=stops, room=room, thought=forced, ids_of=ids_of, text_of=text_of)


def piece(text: str | list[int], *, ended: bool = False, stop_text: str | None = None) -> Response:
    """What an engine gives; the log-prob of a token is minus its id."""
    ids = [*(ids_of(text) if isinstance(text, str) else text), *([END] if ended else [])]
    reason = "stop" if ended or stop_text else "length"
    return Response(
        token_ids=ids, log_probs=[-float(token) for token in ids], finish_reason=reason, stop_text=stop_text
    )


def thought_end(text: str) -> Response:
    return piece(f"{text}</t>", stop_text="</t>")


def told(pieces: TurnPieces) -> list[tuple[str, str]]:
    return [(segment.kind, text_of(segment.token_ids)) for segment in pieces.segments]


def test_a_turn_that_nothing_forces_is_one_piece():
    plain = turn(stops=("</a>",))
    assert (plain.stops, plain.max_tokens) == (("</a>",), 40)
    plain.add(piece("so</t>5", ended=True))
    assert told(plain) == [("generated", "so</t>5<end>")]
    assert (plain.finish_reason, plain.ended_by_text) == ("stop", False)


def test_a_thought_that_ends_is_gone_on_with_as_often_as_asked_for():
    forced = turn(stops=("</a>",), continuations=2, continue_with="Wait")
    assert forced.stops == ("</a>", "</t>")
    forced.add(thought_end("5"))
    forced.add(thought_end("6"))
    assert told(forced) == [("generated", "5"), ("observation", "Wait"), ("generated", "6"), ("observation", "Wait")]
    assert forced.finish_reason is None
    forced.add(thought_end("7"))
    # The thought is over; what follows is the turn's own.
    assert (forced.stops, forced.finish_reason) == (("</a>",), None)
    forced.add(piece("=7", ended=True))
    assert told(forced)[4:] == [("generated", "7</t>=7<end>")]
    assert forced.segments[4].log_probs == tuple(-float(token) for token in forced.segments[4].token_ids)
    assert forced.finish_reason == "stop"


def test_a_thought_that_is_long_enough_may_end():
    forced = turn(continuations=3, min_tokens=3)
    forced.add(thought_end("12"))
    assert told(forced) == [("generated", "12"), ("observation", "Wait")]
    # What was appended counts.
    forced.add(thought_end(""))
    assert told(forced)[2:] == [("generated", "</t>")]


def test_a_thought_that_is_too_long_is_ended_and_the_turn_goes_on():
    forced = turn(room=20, max_tokens=5)
    assert forced.max_tokens == 5
    forced.add(piece("12345"))
    assert told(forced) == [("generated", "12345"), ("observation", "</t>")]
    assert (forced.stops, forced.max_tokens, forced.finish_reason) == ((), 20 - 5 - 4, None)
    forced.add(piece("5", ended=True))
    assert (told(forced)[2], forced.finish_reason) == (("generated", "5<end>"), "stop")


def test_both_bounds_count_what_was_appended():
    forced = turn(continuations=5, max_tokens=10, continue_with="Wait")
    forced.add(thought_end("123"))
    assert forced.max_tokens == 10 - 3 - 4
    # 3 + 4 + 1, and 4 more would be beyond 10: it may end.
    forced.add(thought_end("1"))
    assert told(forced)[2:] == [("generated", "1</t>")]


@pytest.mark.parametrize(
    ("room", "expected", "finish"),
    [
        # "5", "Wait" and one token more.
        (6, [("generated", "5"), ("observation", "Wait")], None),
        (5, [("generated", "5</t>")], "length"),
    ],
)
def test_a_thought_is_gone_on_with_where_there_is_room(room, expected, finish):
    forced = turn(room=room, continuations=1)
    forced.add(thought_end("5"))
    assert (told(forced), forced.finish_reason) == (expected, finish)


@pytest.mark.parametrize(("room", "appended"), [(11, True), (10, False)])
def test_a_thought_is_cut_where_an_answer_has_room(room, appended):
    forced = turn(room=room, max_tokens=6)
    forced.add(piece("123456"))
    assert [kind for kind, _ in told(forced)] == ["generated", *["observation"] * appended]
    assert forced.finish_reason == (None if appended else "length")


@pytest.mark.parametrize("last", [piece("12", ended=True), piece("12</a>", stop_text="</a>")])
def test_a_turn_that_ends_in_its_thought_is_over(last):
    forced = turn(stops=("</a>",), continuations=2, max_tokens=30)
    forced.add(last)
    assert (forced.finish_reason, forced.ended_by_text) == ("stop", last.stop_text is not None)
    assert len(forced.segments) == 1


def test_a_turn_that_the_end_of_its_thought_ends_is_over_when_the_thought_may_be():
    forced = turn(stops=("</t>",), continuations=1)
    assert forced.stops == ("</t>",)
    forced.add(thought_end("5"))
    forced.add(thought_end("6"))
    assert (told(forced)[-1], forced.finish_reason, forced.ended_by_text) == (("generated", "6</t>"), "stop", True)


def test_ids_stay_up_to_the_first_that_holds_some_of_the_end():
    assert tokens_before("</t>", ids_of("12</t>"), text_of=text_of) == 2
    assert tokens_before("</t>", [*ids_of("12"), DOT_OPEN, *ids_of("/t>")], text_of=text_of) == 2
    assert tokens_before("</t>", ids_of("</t>"), text_of=text_of) == 0
    assert tokens_before("</t>", ids_of("12"), text_of=text_of) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 must be at least 1"),
        ({"thought": ThoughtConfig(continuations=-1)}, "TurnOptions: thought.continuations -1 must be at least 0"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        TurnOptions(**options)

"""Sokoban for a policy: one answer with the whole plan, or move by move with the board shown after each answer."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lmm_r1.agents.environment import Answered, Environment, Episode, RunningParts, Turn, with_parts
from lmm_r1.data.messages import ImagePart, Part, Row, TextPart, images_of
from lmm_r1.errors import UserError
from lmm_r1.tasks.sokoban import SMALLEST_TILE_PX, draw_board
from remote_rm.sokoban_board import MOVE_NAMES, Played, State, is_deadlocked, play, solve
from remote_rm.sokoban_levels import LevelError, Plan, board_text, coordinates_text, read_plan, read_state

View = Literal["image", "text", "coordinates"]
VIEWS: tuple[View, ...] = get_args(View)
OPTIMUM_COLUMN = "optimal_moves"
_FLOORS = " -_"
_REPORTED = 5
_STEP_BY_STEP = (
    "You may write a few moves at a time: you are shown the board after them and go on from there. Write "
    "<answer>stop</answer> where it cannot be solved any more."
)


@dataclass(frozen=True, kw_only=True)
class _Sokoban(Environment):
    rewards: ClassVar[tuple[str, ...]] = ("solved", "boxes_on_goals", "valid_moves", "optimality")
    counts: ClassVar[tuple[str, ...]] = (
        *("moves", "invalid_moves", "pushes", "unread_words", "malformed"),
        *("unknown_optimum", "deadlocked", "given_up"),
    )
    stops: ClassVar[tuple[str, ...]] = ("</answer>",)

    state_key: str = "state"
    """Column with the level: XSB text, its lines, or coordinates."""
    views: tuple[View, ...] = ("image",)
    """How a board is shown."""
    tile_px: int = 28
    """Pixels on a square's side."""
    max_states: int = 50_000
    """So far the solver looks for the optimum of a row without the column `optimal_moves`."""

    def __post_init__(self) -> None:
        """Raises UserError for options that make no environment."""
        unknown = [view for view in self.views if view not in VIEWS]
        if isinstance(self.views, str) or unknown or not self.views:
            raise UserError(f"{self.name}: views {self.views!r} must be a list of some of {', '.join(VIEWS)}")
        if self.tile_px < SMALLEST_TILE_PX:
            raise UserError(f"{self.name}: tile_px {self.tile_px} must be at least {SMALLEST_TILE_PX}")

    def shown_row(self, row: Row) -> Row:
        """Return the row with its board, where it has no image and does not have the board as text either.

        Raises:
            UserError: its state is no level.
        """
        state = self.state_of(row)
        return row if _shows_board(row, state) else with_parts(row, self.board(state))

    def state_of(self, row: Row) -> State:
        """The state that a row starts from; raises UserError where it holds no level."""
        if self.state_key not in row.columns:
            raise UserError(
                f'{row.location}: no column "{self.state_key}" with a level of Sokoban (found: {", ".join(row.columns)}); '
                f"`lmm-r1 make_task sokoban` writes such rows"
            )
        try:
            return read_state(row.columns[self.state_key])
        except LevelError as error:
            raise UserError(f'{row.location}: "{self.state_key}" is not a Sokoban level: {error}') from error

    def board(self, state: State) -> tuple[Part, ...]:
        """The board in each of the views."""
        return tuple(self._view(state, view) for view in self.views)

    def _view(self, state: State, view: View) -> Part:
        if view == "image":
            return ImagePart(draw_board(state, tile_px=self.tile_px))
        text = board_text(state, floor="-") if view == "text" else coordinates_text(state)
        return TextPart(f"\n{text}\n")


@dataclass(frozen=True, kw_only=True)
class SokobanPlan(_Sokoban):
    """One turn with all moves.

    Parts of the reward: `solved` (0 or 1), `boxes_on_goals` (their share at the end), `valid_moves` (the share of what was
    written that are moves and could be made), `optimality` (fewest moves / moves made, once solved).
    """

    name: ClassVar[str] = "sokoban-plan"

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode of one turn; raises UserError where the row's state is no level."""
        return _PlanEpisode(self, row)


@dataclass(frozen=True, kw_only=True)
class SokobanSteps(_Sokoban):
    """Turns of one or several moves, each answered by the board, until the level is solved, or lost, or given up.

    The parts of the reward are those of `SokobanPlan`. Each turn pays what it has changed of them, so that over an episode
    they sum up to what they are at its end, whatever ends it.
    """

    name: ClassVar[str] = "sokoban"

    ends_when_deadlocked: bool = True
    """Whether the episode is over once a box stands on a dead square or is frozen, off the goals."""
    max_turns: int | None = None
    """After so many turns it is over; None leaves it to the rollout's limits."""

    def shown_row(self, row: Row) -> Row:
        """Return the row with its board, where it does not show it, and with how moves are made turn by turn."""
        return with_parts(super().shown_row(row), (TextPart(f"\n{_STEP_BY_STEP}"),))

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; raises UserError where the row's state is no level."""
        return _StepsEpisode(self, row)


class _SokobanEpisode(Episode):
    """What both environments keep of an episode."""

    def __init__(self, environment: _Sokoban, row: Row) -> None:
        self.start = self.state = environment.state_of(row)
        self.prefill = row.prefill
        self._optimum = _stated_optimum(row)
        self._max_states = environment.max_states
        self._made = 0
        self._written = 0
        self._parts = RunningParts()

    async def play(self, turn: Turn) -> tuple[Plan, Played, dict[str, float], dict[str, int]]:
        """Make the moves of a turn; returns also the parts of the reward and the counts that it earns."""
        plan = read_plan(turn.text)
        played = play(self.state, plan.moves)
        self.state = played.state
        self._made += played.valid
        self._written += played.valid + len(played.invalid) + len(plan.unread)
        counts = {
            "moves": played.valid,
            "invalid_moves": len(played.invalid),
            "pushes": played.pushes,
            "unread_words": len(plan.unread),
            "malformed": int(not plan.is_answer),
        }
        standing = {
            "solved": float(self.state.is_solved),
            "boxes_on_goals": self.state.boxes_on_goals / len(self.state.boxes),
            "valid_moves": self._made / self._written if self._written else 0.0,
            "optimality": 0.0,
        }
        if self.state.is_solved and self._made:
            optimum = self._optimum
            if optimum is None:
                # A search takes seconds at worst: other episodes go on meanwhile.
                optimum = await asyncio.to_thread(_fewest_moves, self.start, self._max_states)
            if optimum is None:
                counts["unknown_optimum"] = 1
            else:
                standing["optimality"] = min(1.0, optimum / self._made)
        return plan, played, self._parts.pay(standing), counts


class _PlanEpisode(_SokobanEpisode):
    async def answer(self, turn: Turn) -> Answered:
        _, _, rewards, counts = await self.play(turn)
        return Answered(rewards=rewards, counts=counts)


class _StepsEpisode(_SokobanEpisode):
    def __init__(self, environment: SokobanSteps, row: Row) -> None:
        super().__init__(environment, row)
        self.environment = environment
        self.turns = 0

    async def answer(self, turn: Turn) -> Answered:
        plan, played, rewards, counts = await self.play(turn)
        self.turns += 1
        is_lost = self.environment.ends_when_deadlocked and is_deadlocked(self.state)
        counts["deadlocked"] = int(is_lost)
        counts["given_up"] = int(plan.stops)
        if self.state.is_solved or is_lost or plan.stops or self.turns == self.environment.max_turns:
            return Answered(rewards=rewards, counts=counts)
        told = TextPart(_told(plan, played))
        return Answered(
            shown=(told, *self.environment.board(self.state)), prefill=self.prefill, rewards=rewards, counts=counts
        )


def _told(plan: Plan, played: Played) -> str:
    """What came of a turn, in words."""
    lines = []
    if not plan.is_answer:
        lines.append("No moves were found: write them as <answer>Right, Down</answer>.")
    elif not plan.moves:
        lines.append("The answer holds no moves: they are Left, Up, Right and Down.")
    if plan.unread:
        more = ", ..." if len(plan.unread) > _REPORTED else ""
        lines.append(f"Words that name no move: {', '.join(word[:20] for word in plan.unread[:_REPORTED])}{more}.")
    for number, move, obstacle in played.invalid[:_REPORTED]:
        lines.append(f"Move {number}, {MOVE_NAMES[move]}, could not be made: {obstacle}.")
    if len(played.invalid) > _REPORTED:
        lines.append(f"{len(played.invalid) - _REPORTED} more moves could not be made.")
    state = played.state
    lines.append(f"Moves made: {played.valid}. Boxes on goals: {state.boxes_on_goals} of {len(state.boxes)}.")
    return "\n".join(lines)


def _shows_board(row: Row, state: State) -> bool:
    if images_of(row.messages):
        return True
    boards = [board_text(state, floor=floor) for floor in _FLOORS] + [coordinates_text(state)]
    texts = [part.text for message in row.messages for part in message.parts if isinstance(part, TextPart)]
    return any(board in text for board in boards for text in texts)


def _stated_optimum(row: Row) -> int | None:
    """The fewest moves as the row states them; None where it does not. Raises UserError for what is no such number."""
    value = row.columns.get(OPTIMUM_COLUMN)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UserError(
            f'{row.location}: "{OPTIMUM_COLUMN}" is {value!r}; the fewest moves that solve the level are needed, or nothing'
        )
    return value


@functools.lru_cache(maxsize=4096)
def _fewest_moves(state: State, max_states: int) -> int | None:
    """The moves of the shortest solution; None where the solver gave up."""
    found = solve(state, fewest="moves", max_states=max_states)
    assert found.verdict != "unsolvable", "it is asked about levels that were solved"
    return len(found.moves) if found.verdict == "solved" else None

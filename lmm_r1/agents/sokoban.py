"""The environments `sokoban`, in which the board is shown after each turn, and `sokoban-plan`, with one turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from PIL import Image, ImageDraw

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn, with_parts
from lmm_r1.data.messages import ImagePart, Part, Row, TextPart, images_of
from lmm_r1.errors import UserError
from remote_rm.sokoban import Level, Plan, Played, level_text, play, read_level, read_plan

View = Literal["image", "text"]
VIEWS: tuple[View, ...] = get_args(View)
OPTIMUM_COLUMN = "optimal_moves"
SMALLEST_TILE_PX = 8
WALL, FLOOR, GRID, GOAL = (70, 74, 84), (232, 230, 222), (206, 204, 196), (214, 40, 57)
BOX, BOX_ON_GOAL, PLAYER = (224, 148, 40), (46, 150, 70), (36, 92, 200)
_REPORTED = 5
_STEP_BY_STEP = (
    "You may write a few moves at a time. Then you are shown the board and continue from there. Write "
    "<answer>stop</answer> if it cannot be solved any more."
)


def draw_board(level: Level, *, tile_px: int) -> Image.Image:
    """The board in RGB, `tile_px` square pixels for each square.

    Raises ValueError for tiles that are too small to be recognised.
    """
    if tile_px < SMALLEST_TILE_PX:
        raise ValueError(f"tiles of {tile_px} px: at least {SMALLEST_TILE_PX} are needed")
    board = Image.new("RGB", (level.width * tile_px, level.height * tile_px), FLOOR)
    brush = ImageDraw.Draw(board)
    for row, line in enumerate(level_text(level).splitlines()):
        for column, symbol in enumerate(line):

            def inset(share: float, top: int = row * tile_px, left: int = column * tile_px) -> tuple[int, ...]:
                margin = round(tile_px * share)
                return left + margin, top + margin, left + tile_px - 1 - margin, top + tile_px - 1 - margin

            brush.rectangle(inset(0), fill=WALL if symbol == "#" else FLOOR, outline=WALL if symbol == "#" else GRID)
            if symbol == ".":
                brush.ellipse(inset(0.32), fill=GOAL)
            elif symbol in "$*":
                brush.rectangle(inset(0.14), fill=BOX if symbol == "$" else BOX_ON_GOAL)
            elif symbol in "@+":
                if symbol == "+":
                    brush.ellipse(inset(0.02), fill=GOAL)
                brush.ellipse(inset(0.16), fill=PLAYER)
    return board


@dataclass(frozen=True, kw_only=True)
class SokobanSteps(Environment):
    """Turns of one or several moves, each answered with the board, until the level is solved, lost or given up.

    Parts of the reward: `solved` (0 or 1), `boxes_on_goals` (their share at the end), `valid_moves` (the share of words that
    are possible moves), `optimality` (the row's `optimal_moves` / moves made, once solved). Each turn is rewarded with their
    changes, so that their sums over an episode are their last values.
    """

    name: ClassVar[str] = "sokoban"
    rewards: ClassVar[tuple[str, ...]] = ("solved", "boxes_on_goals", "valid_moves", "optimality")
    counts: ClassVar[tuple[str, ...]] = (
        *("moves", "invalid_moves", "pushes", "unread_words", "malformed"),
        *("deadlocked", "given_up"),
    )
    stops: ClassVar[tuple[str, ...]] = ("</answer>",)

    state_key: str = "state"
    """Column with the level: XSB text."""
    views: tuple[View, ...] = ("image",)
    """Whether a board is shown as an image, as text, or both."""
    tile_px: int = 28
    """Side of a square in pixels."""
    ends_when_deadlocked: bool = True
    """Whether the episode ends once a box cannot be pushed to a goal any more."""
    max_turns: int | None = None
    """Number of turns after which the episode ends; None has only the rollout's limits."""

    def __post_init__(self) -> None:
        """Raise UserError for invalid options."""
        unknown = [view for view in self.views if view not in VIEWS]
        if isinstance(self.views, str) or unknown or not self.views:
            raise UserError(f"{self.name}: views {self.views!r} must be a list of some of {', '.join(VIEWS)}")
        if self.tile_px < SMALLEST_TILE_PX:
            raise UserError(f"{self.name}: tile_px {self.tile_px} must be at least {SMALLEST_TILE_PX}")

    def shown_row(self, row: Row) -> Row:
        """Return the row with its board, if it is not in it, and with the explanation of turns.

        Raises:
            UserError: its state is not a level.
        """
        level = self.level_of(row)
        texts = [part.text for message in row.messages for part in message.parts if isinstance(part, TextPart)]
        boards = [level_text(level, floor=floor) for floor in " -_"]
        if not images_of(row.messages) and not any(board in text for board in boards for text in texts):
            row = with_parts(row, self.board(level))
        return row if self.max_turns == 1 else with_parts(row, (TextPart(f"\n{_STEP_BY_STEP}"),))

    def level_of(self, row: Row) -> Level:
        """Return the first level of a row; raises UserError if it has none."""
        if self.state_key not in row.columns:
            raise UserError(
                f'{row.location}: no column "{self.state_key}" with a level of Sokoban (found: {", ".join(row.columns)}); '
                f"`lmm-r1 make_task sokoban` writes such rows"
            )
        try:
            return read_level(row.columns[self.state_key])
        except ValueError as error:
            raise UserError(f'{row.location}: "{self.state_key}" is not a Sokoban level: {error}') from error

    def board(self, level: Level) -> tuple[Part, ...]:
        """Return the board in all views."""
        image = ImagePart(draw_board(level, tile_px=self.tile_px))
        text = TextPart(f"\n{level_text(level, floor='-')}\n")
        return tuple(image if view == "image" else text for view in self.views)

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; raises UserError if the row's state is not a level."""
        return _SokobanEpisode(self, row)


@dataclass(frozen=True, kw_only=True)
class SokobanPlan(SokobanSteps):
    """One turn with all moves, with the same parts of the reward."""

    name: ClassVar[str] = "sokoban-plan"
    max_turns: int | None = 1


class _SokobanEpisode(Episode):
    def __init__(self, environment: SokobanSteps, row: Row) -> None:
        optimum = row.columns.get(OPTIMUM_COLUMN)
        if optimum is not None and (not isinstance(optimum, int) or isinstance(optimum, bool) or optimum < 0):
            raise UserError(f'{row.location}: "{OPTIMUM_COLUMN}" is {optimum!r}; give a number of moves, or nothing')
        self.level = environment.level_of(row)
        self._environment = environment
        self._prefill = row.prefill
        self._optimum: int = optimum or 0
        self._turns = self._made = self._written = 0
        self._paid: dict[str, float] = {}

    async def answer(self, turn: Turn) -> Answered:
        plan = read_plan(turn.text)
        played = play(self.level, plan.moves)
        level = self.level = played.level
        self._turns += 1
        self._made += played.valid
        self._written += played.valid + len(played.invalid) + len(plan.unread)
        standing = {
            "solved": float(level.is_solved),
            "boxes_on_goals": len(level.boxes & level.goals) / len(level.boxes),
            "valid_moves": self._made / self._written if self._written else 0.0,
            "optimality": min(1.0, self._optimum / self._made) if level.is_solved and self._made else 0.0,
        }
        is_lost = self._environment.ends_when_deadlocked and level.is_lost
        counts = {
            "moves": played.valid,
            "invalid_moves": len(played.invalid),
            "pushes": played.pushes,
            "unread_words": len(plan.unread),
            "malformed": int(not plan.is_answer),
            "deadlocked": int(is_lost),
            "given_up": int(plan.stops),
        }
        # Changes of the parts, so that each one's sum over an episode is its last value, however the episode ends.
        rewards = {name: value - self._paid.get(name, 0.0) for name, value in standing.items()}
        self._paid = standing
        if level.is_solved or is_lost or plan.stops or self._turns == self._environment.max_turns:
            return Answered(rewards=rewards, counts=counts)
        shown = (TextPart(_told(plan, played)), *self._environment.board(level))
        return Answered(shown=shown, prefill=self._prefill, rewards=rewards, counts=counts)


def _told(plan: Plan, played: Played) -> str:
    """Return the result of a turn as text."""
    lines = []
    if not plan.is_answer:
        lines.append("No moves were found: write them as <answer>Right, Down</answer>.")
    elif not plan.moves:
        lines.append("The answer contains no moves: they are Left, Up, Right and Down.")
    if plan.unread:
        lines.append(f"Words that are not moves: {', '.join(word[:20] for word in plan.unread[:_REPORTED])}.")
    if played.invalid:
        first = ", ".join(f"{number} ({move})" for number, move in played.invalid[:_REPORTED])
        lines.append(f"{len(played.invalid)} moves were blocked by a wall or a box, first {first}.")
    level = played.level
    lines.append(
        f"Moves made: {played.valid}. Boxes on goals: {len(level.boxes & level.goals)} of {len(level.boxes)}."
    )
    return "\n".join(lines)

"""Real handwritten digits, offline: the 1,797 scans of 8x8 pixels that scikit-learn bundles, and pages of them."""

import functools
import random
from dataclasses import dataclass

from PIL import Image

from lmm_r1.tasks.task import Split, split_of

# Chalk on a grey board: the board is close to the mean that image processors subtract, so that an empty cell gives
# features near zero and does not drown the digits. The gain over black on white was not measured on its own.
BOARD = 122
CHALK = 255
SCAN_PX = 8
_MOST_INK = 16.0


@functools.lru_cache(maxsize=1)
def _bundled() -> tuple[tuple[int, Image.Image], ...]:
    """(digit, scan) for every scan in scikit-learn's order; scans are grey, chalk on a board."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    pixels = (BOARD + (CHALK - BOARD) * bundle.images / _MOST_INK).round().astype("uint8")  # (1797, 8, 8)
    return tuple((int(digit), Image.fromarray(scan)) for digit, scan in zip(bundle.target, pixels, strict=True))


@functools.lru_cache(maxsize=2)
def scan_indices(split: Split) -> tuple[tuple[int, ...], ...]:
    """For each digit 0 to 9 the indices of its scans in `split`; no scan is in both splits."""
    indices: list[list[int]] = [[] for _ in range(10)]
    for index, (digit, _) in enumerate(_bundled()):
        if split_of(f"scan {index}") == split:
            indices[digit].append(index)
    return tuple(map(tuple, indices))


def scan(index: int) -> Image.Image:
    """The scan at `index` of scikit-learn's bundle: 8x8 pixels, grey, chalk on a board."""
    return _bundled()[index][1]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one scan lies on a page, in pixels from the upper left corner."""

    scan_index: int
    left: int
    top: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """A square page of cells: each digit lies in a cell of its own and never crosses the cell's edge.

    Each digit also has a column of its own, in which it lies at any height, so that only left to right orders them.
    """

    cells: int = 3
    """Cells on each side."""
    cell_px: int = 28
    """Pixels on a cell's side; 28 is one visual token of a ViT with patches of 14 pixels merged 2x2."""
    min_digit_px: int = 22
    max_digit_px: int = 26
    jitter_px: int = 2
    """A digit lies at most this far from its cell's centre, and less where a large one would leave the cell."""

    def __post_init__(self) -> None:
        if not SCAN_PX <= self.min_digit_px <= self.max_digit_px <= self.cell_px:
            raise ValueError(
                f"digits of {self.min_digit_px} to {self.max_digit_px} px must be at least {SCAN_PX} px and fit "
                f"a cell of {self.cell_px} px"
            )

    @property
    def side_px(self) -> int:
        return self.cells * self.cell_px

    def place(self, digits: tuple[int, ...], *, split: Split, rng: random.Random) -> list[Placement]:
        """Random scans of `digits` in reading order: one in each column from the left, each in a random row of cells.

        At most `cells` digits; with fewer the columns at the right stay empty.
        """
        assert len(digits) <= self.cells, "the task bounds its digits by the page's columns"
        return [self._in_column(column, digit, split=split, rng=rng) for column, digit in enumerate(digits)]

    def _in_column(self, column: int, digit: int, *, split: Split, rng: random.Random) -> Placement:
        row = rng.randrange(self.cells)
        size = rng.randint(self.min_digit_px, self.max_digit_px)
        margin = (self.cell_px - size) // 2
        reach = min(self.jitter_px, margin)
        return Placement(
            scan_index=rng.choice(scan_indices(split)[digit]),
            left=column * self.cell_px + margin + rng.randint(-reach, reach),
            top=row * self.cell_px + margin + rng.randint(-reach, reach),
            size=size,
        )

    def draw(self, placements: list[Placement]) -> Image.Image:
        """The page in grey, `side_px` square, with each scan enlarged to its size."""
        page = Image.new("L", (self.side_px, self.side_px), BOARD)
        for placement in placements:
            enlarged = scan(placement.scan_index).resize((placement.size, placement.size), Image.Resampling.BICUBIC)
            page.paste(enlarged, (placement.left, placement.top))
        return page

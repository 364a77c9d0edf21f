"""The task `message_decoding`: read a message by the decoder in a picture, some entries of which take a closer look.

The idea is r1_vlm's (Groundlight, 2025); words, pictures and rows are made here.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from lmm_r1.errors import UserError
from lmm_r1.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of
from lmm_r1.tasks.glyphs import ARROW, GLYPH_HEIGHT, draw_text, text_width

WORDS = tuple("""
    ABLE ABOUT ABOVE ACROSS AFTER AGAIN AGREE AIR ALIVE ALMOST ALONE ALONG AMONG ANGLE ANIMAL ANSWER APPLE ARM AROUND ARRIVE
    ASK AUTUMN AWAY BABY BACK BAG BALL BANK BASKET BEACH BEAR BEAUTY BED BEFORE BEGIN BEHIND BELL BELOW BENCH BEST BETTER
    BIRD BLACK BLUE BOARD BOAT BODY BOOK BOTTLE BOX BOY BRANCH BREAD BRIDGE BRIGHT BRING BROTHER BROWN BRUSH BUILD BUS
    BUTTER BUY CABIN CAKE CALL CAMP CANDLE CAR CARD CARE CARRY CASTLE CAT CATCH CENTER CHAIR CHANCE CHEESE CHILD CHOOSE
    CIRCLE CITY CLASS CLEAN CLIMB CLOCK CLOSE CLOUD COAT COFFEE COLD COLOR COME COOK COOL CORN CORNER COUNT COUNTRY COVER
    COW CROSS CROWD CUP CURVE CUT DANCE DARK DAY DEEP DESK DINNER DIVIDE DOCTOR DOG DOOR DOWN DRAW DREAM DRESS DRINK DRIVE
    DRY DUCK DUST EAR EARLY EARTH EAST EASY EAT EDGE EGG EIGHT ELBOW EMPTY ENGINE ENJOY ENOUGH EQUAL EVENING EVERY EYE
    FACE FACT FALL FAMILY FARM FAST FATHER FEATHER FEEL FENCE FIELD FIGHT FILL FIND FINGER FINISH FIRE FISH FIVE FLAG
    FLOOR FLOWER FLY FOLLOW FOOD FOOT FOREST FORK FOUR FOX FREE FRESH FRIEND FROG FRONT FRUIT FULL GAME GARDEN GATE GENTLE
    GIANT GIFT GIRL GIVE GLASS GLOVE GOAT GOLD GOOD GRASS GREAT GREEN GREY GROUND GROUP GROW GUESS GUEST HAIR HALF HAMMER
    HAND HAPPY HARBOR HAT HEAD HEAR HEART HEAVY HELP HERE HIDE HIGH HILL HOLD HOLE HOME HONEY HOPE HORSE HOT HOUR HOUSE
    HUNDRED HUNGRY ICE IDEA INCH INK INSECT IRON ISLAND JACKET JAR JOB JOIN JUICE JUMP JUNGLE KEEP KEY KICK KIND KING
    KITCHEN KNEE KNIFE KNOCK KNOW LADDER LAKE LAMP LAND LARGE LAST LATE LAUGH LEAF LEARN LEFT LEMON LETTER LEVEL LIFT LIGHT
    LINE LION LIST LISTEN LITTLE LONG LOOK LOUD LOVE LUCKY LUNCH MAKE MAP MARKET MATCH MEAL MEASURE MEET MELON METAL
    MIDDLE MILK MIND MINUTE MIRROR MIX MONEY MONKEY MONTH MOON MORNING MOTHER MOUSE MOUTH MOVE MUSIC NAIL NAME NARROW NEAR
    NECK NEEDLE NEST NEW NIGHT NINE NOISE NORTH NOSE NOTE NUMBER OAK OCEAN OFFICE OIL OLD ONION OPEN ORANGE ORDER OTHER
    OVEN OWL PAGE PAINT PAIR PAPER PARENT PARK PART PARTY PATH PEACE PEAR PENCIL PEOPLE PEPPER PIANO PICK PICTURE PIECE
    PIG PILOT PLACE PLAIN PLANE PLANT PLATE PLAY POCKET POEM POINT POND POOL POTATO POUND PRINCE PRIZE PULL PUSH QUEEN
    QUICK QUIET RABBIT RAIN REACH READ READY RED REST RICE RICH RIDE RIGHT RING RIVER ROAD ROCK ROOF ROOM ROOT ROPE ROSE
    ROUND ROW RULE RUN SAD SAFE SAIL SALT SAND SCHOOL SEA SEASON SEAT SECOND SEED SEVEN SHADE SHAPE SHARE SHARP SHEEP
    SHELF SHIP SHIRT SHOE SHOP SHORT SHOUT SHOW SILK SILVER SING SISTER SIT SIX SIZE SKIN SKY SLEEP SLOW SMALL SMILE SMOKE
    SNAKE SNOW SOAP SOFT SONG SOUND SOUP SOUTH SPACE SPOON SPRING SQUARE STAIR STAMP STAR START STATION STAY STEAM STICK
    STONE STOP STORE STORM STORY STREET STRONG SUGAR SUMMER SUN SURE SWEET SWIM TABLE TAIL TALK TALL TASTE TEACH TEAM TEN
    TENT THANK THICK THIN THING THINK THREE THROW THUMB TICKET TIGER TIME TODAY TOOL TOOTH TOUCH TOWER TOWN TOY TRAIN TREE
    TRIP TRUCK TRUST TURN TWELVE TWO UNCLE UNDER VALLEY VISIT VOICE WAIT WALK WALL WARM WASH WATCH WATER WAVE WEATHER WEEK
    WEST WHEEL WHITE WIDE WIND WINDOW WINTER WISH WOLF WOMAN WOOD WOOL WORD WORK WORLD WRITE YARD YEAR YELLOW YOUNG ZEBRA
    ZERO ZOO
    """.split())
SPACE = "_"
_INK = 0
_PAPER = 255
_ENTRY_DOTS = text_width("A>A")
# How many of a message's letters have a tiny entry: one, two or three.
_TINY_ASKED = (1, 2, 3)
_TINY_WEIGHTS = (80, 15, 5)
# A tiny dot is a fourth of a pixel of the first view: letters are 1.25 x 1.75 pixels there.
_TINY_SHRINK = 4
# A fifth of the words and strings belongs to the test split: this many draws for each of a message find one.
_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One letter of the decoder as it is drawn, in pixels from the upper left corner."""

    code: str
    plain: str
    left: int
    top: int
    dot_px: int

    @property
    def box(self) -> list[int]:
        """Left, top, right and bottom."""
        return [self.left, self.top, self.left + _ENTRY_DOTS * self.dot_px, self.top + GLYPH_HEIGHT * self.dot_px]


@dataclass(frozen=True, kw_only=True)
class MessageDecodingTask:
    """Train and test share no word; below 26 letters, where messages are random strings, no string.

    The picture is `view_px * zoom` square and is shown at `view_px`: tiny entries can then be read in a crop only, and each
    message needs one at least. Each row has the columns `coded` and `boxes`: the code letters whose entries it needs, each
    with left, top, right and bottom of its entry in pixels of the picture, tiny ones first.
    """

    letters: int = 26
    """The number of letters of the alphabet in the decoder, 3 to 26."""
    min_words: int = 1
    """Words in a message; a random string counts as one."""
    max_words: int = 1
    longest_string: int = 5
    """Most letters of a random string."""
    tiny_entries: int = 0
    """Entries of the decoder that are drawn too small for the first view."""
    view_px: int = 280
    """Pixels on the picture's side as it is first shown; a row asks for no more."""
    zoom: int = 1
    """How many times larger the picture itself is."""
    dot_px: int = 2
    """Pixels of the first view on a dot's side: letters are 5 x 7 dots. Those of a tiny entry have a fourth of a pixel."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if not 3 <= self.letters <= 26:
            raise ValueError(f"{self.letters} letters: 3 to 26 are needed")
        if not 1 <= self.min_words <= self.max_words:
            raise ValueError(
                f"{self.min_words} to {self.max_words} words: at least one is needed, and the most must not be below the fewest"
            )
        if self.longest_string < 1 or self.dot_px < 1 or self.zoom < 1:
            raise ValueError("longest_string, dot_px and zoom must be at least 1")
        if not 0 <= self.tiny_entries <= self.letters:
            raise ValueError(f"{self.tiny_entries} tiny entries: the decoder has {self.letters}")
        if self.tiny_entries and self.zoom < _TINY_SHRINK:
            raise ValueError(
                f"zoom {self.zoom}: with tiny entries it must be at least {_TINY_SHRINK}, so that a crop shows what the first view "
                "does not"
            )
        width, height = _ENTRY_DOTS * self.dot_px, GLYPH_HEIGHT * self.dot_px
        if width > self.view_px // self._columns or height > self.view_px // self._lines:
            raise ValueError(
                f"view_px {self.view_px}: {self.letters} entries of {width} x {height} pixels do not fit; a larger view or a "
                "smaller dot_px is needed"
            )

    @property
    def _columns(self) -> int:
        return math.isqrt(self.letters - 1)

    @property
    def _lines(self) -> int:
        return -(-self.letters // self._columns)

    def at_difficulty(self, level: int) -> MessageDecodingTask:
        """The task with five more letters per level, up to the whole alphabet and words."""
        return replace(self, letters=(6, 11, 16, 21, 26)[level - 1])

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"message_decoding {split} {kind} {seed} {index}")
            words = self._words(split=split, rng=rng)
            yield self._row(words, kind=kind, rng=rng)

    def _row(self, words: list[str], *, kind: Literal["text", "image"], rng: random.Random) -> TaskRow:
        alphabet = string.ascii_uppercase[: self.letters]
        codes = dict(zip(alphabet, rng.sample(alphabet, self.letters), strict=True))
        plain = SPACE.join(words)
        coded = " ".join(codes.get(letter, SPACE) for letter in plain)
        entries = self._entries(codes, needed=sorted(set(plain) - {SPACE}), rng=rng)
        shown = {entry.code: entry for entry in sorted(entries, key=lambda entry: (entry.dot_px, entry.code))}
        boxes = {code: entry.box for code, entry in shown.items() if code in coded}
        reading = [f"{codes[letter]} is {letter}" if letter != SPACE else "a space" for letter in plain]
        return TaskRow(
            messages=[{"role": "user", "content": self._content(kind, entries, coded)}],
            answer=" ".join(words),
            datasource=f"message_decoding_{kind}_{'words' if self.letters == 26 else 'strings'}",
            solution=f"<think>{', '.join(reading)}.</think><answer>{' '.join(words)}</answer>",
            columns={"coded": coded, **({"boxes": boxes} if kind == "image" else {})},
        )

    def _words(self, *, split: Split, rng: random.Random) -> list[str]:
        count = rng.randint(self.min_words, self.max_words)
        words: list[str] = []
        for _ in range(count * _DRAWS):
            word = rng.choice(WORDS) if self.letters == 26 else self._string(rng)
            if split_of(f"message {word}") == split:
                words.append(word)
            if len(words) == count:
                return words
        raise UserError(
            f"no string of up to {self.longest_string} of {self.letters} letters belongs to the split {split}; ask for longer "
            "strings or more letters"
        )

    def _string(self, rng: random.Random) -> str:
        length = rng.randint(1, self.longest_string)
        return "".join(rng.choices(string.ascii_uppercase[: self.letters], k=length))

    def _entries(self, codes: dict[str, str], *, needed: list[str], rng: random.Random) -> list[Entry]:
        """Every letter's entry in random order, each at a random place of its cell; tiny ones are chosen at random."""
        tiny = self._tiny(needed, others=sorted(set(codes) - set(needed)), rng=rng)
        side = self.view_px * self.zoom
        cell_width, cell_height = side // self._columns, side // self._lines
        entries = []
        for place, plain in enumerate(rng.sample(sorted(codes), len(codes))):
            dot_px = self.zoom // _TINY_SHRINK if plain in tiny else self.dot_px * self.zoom
            line, column = divmod(place, self._columns)
            left = column * cell_width + rng.randint(0, cell_width - _ENTRY_DOTS * dot_px)
            top = line * cell_height + rng.randint(0, cell_height - GLYPH_HEIGHT * dot_px)
            entries.append(Entry(code=codes[plain], plain=plain, left=left, top=top, dot_px=dot_px))
        return entries

    def _tiny(self, needed: list[str], *, others: list[str], rng: random.Random) -> set[str]:
        if not self.tiny_entries:
            return set()

        asked = min(rng.choices(_TINY_ASKED, _TINY_WEIGHTS)[0], len(needed), self.tiny_entries)
        # Where the others are too few, more of the needed ones are tiny.
        asked = max(asked, self.tiny_entries - len(others))
        return {*rng.sample(needed, asked), *rng.sample(others, self.tiny_entries - asked)}

    def _content(self, kind: Literal["text", "image"], entries: list[Entry], coded: str) -> str | Parts:
        question = (
            f'Decode the message "{coded}" by the decoder{" in the picture" if kind == "image" else ""}: each entry shows a '
            f"letter of the code, an arrow and the letter that it stands for; {SPACE} is a space. Write the message in "
            "capitals as <answer>MESSAGE</answer>."
        )
        if kind == "text":
            return "\n".join([*(f"{entry.code} → {entry.plain}" for entry in entries), question])
        picture = {"type": "image", "image": self.draw(entries), "max_pixels": self.view_px**2}
        return [picture, {"type": "text", "text": question}]

    def draw(self, entries: list[Entry]) -> Image.Image:
        """The decoder, black on white, `view_px * zoom` square."""
        page = np.full((self.view_px * self.zoom,) * 2, _PAPER, dtype=np.uint8)
        for entry in entries:
            text = f"{entry.code}{ARROW}{entry.plain}"
            draw_text(page, text, left=entry.left, top=entry.top, dot_px=entry.dot_px, ink=_INK)
        return Image.fromarray(page)


TASK = MessageDecodingTask()

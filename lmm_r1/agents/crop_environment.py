"""The environment `crop`: a policy cuts parts out of the images it is shown, in Mini-o3's protocol.

It follows Mini-o3 (https://github.com/Mini-o3/Mini-o3), in words of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmm_r1.agents.calls import CROP, GROUNDING, TOOL_CALL
from lmm_r1.agents.crop import UNITS, Coordinates, crop_tool
from lmm_r1.agents.images import ORIGINAL
from lmm_r1.agents.tool_environment import (
    MAX_PIXELS,
    MIN_PIXELS,
    SIDE_MULTIPLE,
    ToolEnvironment,
    ToolOutcome,
    explained_tools,
)
from lmm_r1.agents.tools import Tool
from lmm_r1.data.messages import Part, Row, TextPart, images_of

_EXAMPLES = {
    "relative": "[0.25, 0.5, 0.75, 1.0]",
    "thousandths": "[250, 500, 750, 1000]",
    "absolute": "[28, 28, 140, 84]",
}


class CropEnvironment(ToolEnvironment):
    """Answers `<grounding>` blocks with the part of the image that they name, and other calls by its further tools.

    A row without images is shown as it is.
    """

    name = "crop"
    stops = (GROUNDING.closing, TOOL_CALL.closing)
    formats = (GROUNDING, TOOL_CALL)

    def __init__(
        self,
        *,
        coordinates: Coordinates = "relative",
        tools: Sequence[Tool | Callable[..., object]] = (),
        min_pixels: int = MIN_PIXELS,
        max_pixels: int = MAX_PIXELS,
        side_multiple: int = SIDE_MULTIPLE,
        prefill: str = "",
    ) -> None:
        """Make the tools; raises UserError as `ToolEnvironment` does, and for coordinates that are none.

        Args:
            coordinates: of boxes; absolute ones are pixels of the image as it is shown within its bounds.
            tools: offered beside it, called in `<tool_call>` blocks: `zoom_tool()`, or functions.
        """
        super().__init__(
            [crop_tool(coordinates=coordinates), *tools],
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            side_multiple=side_multiple,
            prefill=prefill,
        )
        self._coordinates = coordinates

    def shown_row(self, row: Row) -> Row:
        """Return the row with the protocol explained in its system turn, and its images bounded."""
        return super().shown_row(row) if images_of(row.messages) else row

    def explained(self, row: Row) -> str:
        """Return what a policy is told of the protocol."""
        images = len(images_of(row.messages))
        names = ORIGINAL if images == 1 else ", ".join(f"{ORIGINAL}_{number}" for number in range(1, images + 1))
        first = ORIGINAL if images == 1 else f"{ORIGINAL}_1"
        text = (
            "Details that are too small to see at first can be looked at closely before you answer. Think inside <think> "
            "</think>. To see a part of an image larger, end your turn with one call:\n"
            f'<grounding>{{"bbox_2d": {_EXAMPLES[self._coordinates]}, "source": "{first}"}}</grounding>\n'
            "bbox_2d is [x0, y0, x1, y1], the top-left and the bottom-right corner of the part, "
            f"{UNITS[self._coordinates]}. source is the image that it is cut from: {names}, or observation_1, observation_2 "
            "and so on, as the parts that you are shown are called. Once you know the answer, write it inside <answer> "
            "</answer>, without a call."
        )
        further = [tool for tool in self.tools.values() if tool.name != CROP]
        return f"{text}\n\n{explained_tools(further, has_images=False)}" if further else text

    def answered(self, outcome: ToolOutcome) -> list[Part]:
        """Return the parts that were cut out, or what was wrong, and how to go on."""
        if outcome.problem:
            return [
                TextPart(
                    f"This call was not carried out: {outcome.problem}. No observation was added. Think about what went "
                    "wrong inside <think> </think>, then call again, or answer inside <answer> </answer>."
                )
            ]
        parts: list[Part] = []
        for name, image in zip(outcome.names, outcome.result.images, strict=True):
            parts += [TextPart(f"This is {name}:\n"), self.bounds.of(image), TextPart("\n")]
        text = f"{outcome.result.text}\n" if outcome.result.text else ""
        return [
            *parts,
            TextPart(
                f"{text}Go on thinking inside <think> </think>. Then look closer at the original image or an observation by "
                "another call, or answer inside <answer> </answer>."
            ),
        ]

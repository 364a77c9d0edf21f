"""The environment `crop` with its tool switched off, a control: `--train.agent benchmarks/tool_off.py`."""

from typing import NoReturn

from lmm_r1.agents.calls import BadCall
from lmm_r1.agents.tool_environment import CropEnvironment


class ToolOff(CropEnvironment):
    """Explains the same protocol in the same words, and answers every call that the tool is switched off."""

    name = "tool-off"

    def tool(self, name: str) -> NoReturn:
        """Raise BadCall, whatever the tool."""
        raise BadCall("the tool is switched off")

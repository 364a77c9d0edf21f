"""Settings of other trainers as settings of ours: pure tables and rules, from their names and values to our flags."""

from __future__ import annotations

from lmm_r1.tools.migrate.inputs import RunOfAnother, read_run
from lmm_r1.tools.migrate.table import Conversion, Note, convert, to_document

__all__ = ["Conversion", "Note", "RunOfAnother", "convert", "read_run", "to_document"]

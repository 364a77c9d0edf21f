"""Settings of other trainers as settings of ours: pure tables and rules, from their names and values to our flags."""

from lmm_r1.config.conversion.document import to_document
from lmm_r1.config.conversion.inputs import RunOfAnother, read_run
from lmm_r1.config.conversion.table import Conversion, Note, convert

__all__ = ["Conversion", "Note", "RunOfAnother", "convert", "read_run", "to_document"]

"""Reports: runs as one self-contained HTML page, and a curriculum's summary as JSON."""

from lmm_r1.tools.report.pages import build_comparison, build_report
from lmm_r1.tools.report.stages import summarize, write_summary

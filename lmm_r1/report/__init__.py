"""Reports: runs as one self-contained HTML page, and a curriculum's summary as JSON."""

from lmm_r1.report.comparison_page import build_comparison
from lmm_r1.report.page import build_report
from lmm_r1.report.stages import summarize, write_summary

"""Services that show a run while it trains, next to the run folder's own metrics.jsonl: see docs/loggers.md."""

from lmm_r1.records.trackers.backends import check_trackers, open_trackers
from lmm_r1.records.trackers.trackers import Generation, Tracker, Trackers

"""Held-out accuracy of checkpoints: files and suites of rows, the statistics of what was answered, the scoreboard."""

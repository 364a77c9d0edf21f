"""Checks a row file for what a training would fail at: `lmm-r1 check_data`."""

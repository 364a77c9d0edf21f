"""Models driven by a kit."""

from lmm_r1 import cpu

# Modules of this package import transformers.
cpu.prepare()

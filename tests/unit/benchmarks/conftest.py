"""The benchmarks' modules are scripts beside one another, not a package: they are found as Python finds a script's own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

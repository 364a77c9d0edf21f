"""Judges two expressions when it is imported: in the process that workers are forked from, so that none starts cold.

sympy and the LaTeX grammar set up much at their first use, which would count against the first items of every worker.
"""

from remote_rm.accuracy import matches

matches(r"\sqrt{8}+x", r"x+2\sqrt{2}")
matches(r"\frac{x^2-1}{x-1}", "x+1")

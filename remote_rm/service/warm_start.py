"""Compares some expressions on import, in the process from which workers are forked, so that no worker starts cold.

The first use of each kind of function in sympy and the LaTeX grammar takes up to 0.1 s, which would count against the first
items of every worker.
"""

from remote_rm.answers.algebra import same_expression

same_expression(r"\sqrt{8}+x", r"x+2\sqrt{2}")
same_expression(r"\frac{x^2-1}{x-1}", "x+1")
same_expression(r"\ln 12", r"\ln 13")
same_expression(r"\sqrt[3]{55}", r"2^{1389}")
same_expression(r"\sin 2x", r"2\sin x\cos x")
same_expression("x^2+y=5", "x^2+y=6")
same_expression(r"(1,2)\cup(3,4)", r"\{1,2\}")

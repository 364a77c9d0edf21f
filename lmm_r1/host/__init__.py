"""The only room that imports `openrlhf` or `deepspeed`, or replaces anything of theirs.

Whoever moves to another host rewrites this folder. Other rooms take upstream's names from modules that are split by what
they load, so that nobody loads Ray or DeepSpeed for a name that needs neither.
"""

"""The only room that imports `openrlhf` or `deepspeed`, or replaces anything of theirs.

To move to another host, rewrite this folder. Other rooms take upstream's names from modules that are split by what they
load: vLLM's processes never load DeepSpeed.
"""

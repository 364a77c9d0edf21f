"""A pure-PyTorch stand-in for the parts of flash-attn that OpenRLHF imports; see README.md."""

from setuptools import setup

setup(
    name="flash-attn",
    version="2.8.3+cpu",
    description="Stand-in for flash-attn on machines where it cannot be compiled",
    packages=["flash_attn", "flash_attn.utils"],
    python_requires=">=3.10",
)

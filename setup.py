"""Packages of the distribution; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["lmm_r1", "lmm_r1.*", "remote_rm", "remote_rm.*"]))

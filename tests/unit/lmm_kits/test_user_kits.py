"""Kits of a user's file: where they are found, and what is said of files that hold none."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from lmm_r1 import register_kit
from lmm_r1.cluster import KIT_VARIABLE, worker_runtime
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit, kit_of
from lmm_r1.lmm_kits.registry import given_files, kit_name_of

FILE = """
from lmm_r1.lmm_kits.llm import LanguageModelKit

class Kit(LanguageModelKit):
    model_type = "own"
    def __init__(self, *, closes="."):
        self.closes = closes

class Other(Kit):
    model_type = "gemma3"

def broken():
    return open("gone")

nothing = dict
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(KIT_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    for name in ("own", "gemma3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name, "vision_config": {}}))
    return f"{tmp_path}/mine.py"


def test_a_file_serves_its_architecture_and_may_replace_a_kit_of_the_project(file):
    with pytest.raises(UserError, match="no kit for model_type 'own'"):
        kit_name_of("own")
    kit = register_kit("mine.py?closes=!")
    assert (kit.closes, kit_of("own"), get_kit("own"), kit_name_of("own")) == ("!", kit, kit, "own")
    assert not kit_of("own").takes_images
    assert type(kit_of("gemma3")).__name__ == "Gemma3Kit"
    register_kit("mine.py:Other")
    assert type(kit_of("gemma3")).__name__ == "Other"
    assert given_files() == [f"{file}:Other", f"{file}?closes=!"]


def test_workers_load_the_file_again(file, tmp_path):
    kit = register_kit("mine.py?closes=!")
    environment = worker_runtime({})["env_vars"]
    assert environment == {KIT_VARIABLE: f"{file}?closes=!"}
    (tmp_path / "kit.pickle").write_bytes(pickle.dumps(kit))
    code = "import pickle; print(pickle.load(open('kit.pickle', 'rb')).closes)"
    code += "; from lmm_r1.lmm_kits import kit_of; print(kit_of('own').closes)"
    told = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, stdout=-1, check=True)
    assert told.stdout.split() == [b"!", b"!"]


def test_a_file_without_a_kit_is_refused_with_its_line(file):
    with pytest.raises(UserError, match=r"--kit .*py:broken: it raised FileNotFoundError: .*, at .*mine\.py, line 13"):
        register_kit("mine.py:broken")
    with pytest.raises(UserError, match=r"mine.py:nothing: dict is no LmmKit; subclass lmm_r1.lmm_kits.LmmKit"):
        register_kit("mine.py:nothing")
    assert given_files() == []
    with pytest.raises(UserError, match=r"no kit for model_type 'qwen2_v'; did you mean qwen2_vl\? known: aria"):
        get_kit("qwen2_v")

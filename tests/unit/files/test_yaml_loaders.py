"""YAML that is made to fill the memory or the stack."""

import pytest
import yaml

from lmm_r1.files.yaml_loaders import BaseLoader, SafeLoader

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
DEEP = "a: " + "[" * 1500 + "]" * 1500


@pytest.mark.parametrize("loader", [SafeLoader, BaseLoader])
@pytest.mark.parametrize("text", [LAUGHS, DEEP, "&a [*a]", "&a {b: *a}", "a: " + "[" * 64 + "]" * 64])
def test_a_document_that_stands_for_too_much_is_an_error_of_yaml(loader, text):
    with pytest.raises(
        yaml.YAMLError, match="more than 64 levels, or its aliases stand for more than 1,000,000 values"
    ):
        yaml.load(text, Loader=loader)


def test_aliases_and_depth_within_reason_are_read():
    text = "\n".join(LAUGHS.splitlines()[:5])
    assert yaml.load(text, Loader=SafeLoader) == yaml.safe_load(text)
    assert yaml.load("a: 1\nb: [2, 1e5]", Loader=BaseLoader) == {"a": "1", "b": ["2", "1e5"]}

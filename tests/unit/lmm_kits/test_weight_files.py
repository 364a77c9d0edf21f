import json
import struct

import pytest

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import check_weights


def safetensors(*sizes):
    """A weight file of U8 tensors with these many bytes, as the format lays it out."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for index, size in enumerate(sizes):
        header[f"w{index}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def test_a_model_in_several_parts_passes_when_all_are_there(tmp_path):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(safetensors(3))
    with pytest.raises(UserError, match="two.safetensors: this weight file, which model.safetensors.index.json names"):
        check_weights(str(tmp_path))
    (tmp_path / "two.safetensors").write_bytes(safetensors(4))
    check_weights(str(tmp_path))


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no weights in this folder .*; copy them into it"):
        check_weights(str(tmp_path))


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 40, -4, -1])
def test_weights_cut_short_anywhere_are_an_error_with_the_file(kept, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors(3, 5)[:kept])
    with pytest.raises(UserError, match="model.safetensors: the weight file .*; copy it again"):
        check_weights(str(tmp_path))


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.safetensors"}}'],
)
def test_an_index_that_is_none_is_an_error(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="index.json: not an index of weight files"):
        check_weights(str(tmp_path))

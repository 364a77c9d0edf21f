"""Random JSON for every endpoint and random row files for every reader: an answer or a sentence, and never a traceback.

FUZZ_CASES sets how many cases each test tries.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from fastapi.testclient import TestClient
from helpers.chats import reward_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmm_r1.data.files import read_row_file
from lmm_r1.data.preferences import read_pairs
from lmm_r1.errors import UserError

FUZZED = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "60")),
    deadline=None,
    database=None,
    derandomize="FUZZ_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
KEYS = """
query prompts labels responses image_scales model messages role content type text image image_url url path bytes
video videos images fps min_pixels max_pixels n temperature top_p max_tokens stream answer solution problem prompt
response chosen rejected conversations from value completions score steps label data_source extra_info
""".split()
WORDS = (
    "user",
    "assistant",
    "system",
    "tool",
    "text",
    "image",
    "m",
    "",
    "1",
    "\\frac{1}{2}",
    "<image>",
    "/etc/passwd",
)
WORDS += (
    "<image><image>",
    "../a.png",
    "data:image/png;base64,AAAA",
    "http://127.0.0.1/",
    "\ud800",
    "\0",
    "[{",
    "nan",
    "1e999",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**310),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=20),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=5),
    max_leaves=25,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(WORDS[:4]) | JSON, "content": JSON})
RECORD = st.dictionaries(st.sampled_from(KEYS), st.lists(MESSAGE, max_size=3) | JSON, max_size=6)
BODY = st.one_of(
    JSON.map(json.dumps).map(str.encode),
    RECORD.map(json.dumps).map(str.encode),
    st.fixed_dictionaries({"model": st.just("m"), "messages": st.lists(MESSAGE, max_size=3)}, optional={"n": JSON, "stream": JSON})
    .map(json.dumps)
    .map(str.encode),
    st.fixed_dictionaries({key: st.lists(st.sampled_from(WORDS) | JSON, max_size=3) for key in KEYS[:4]})
    .map(json.dumps)
    .map(str.encode),
    st.binary(max_size=200),
    st.tuples(JSON.map(json.dumps).map(str.encode), st.binary(max_size=5)).map(b"".join),
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with reward_client(item_timeout_seconds=5.0) as made:
        yield made


def test_an_endpoint_answers_or_refuses_every_body(client):
    @FUZZED
    @given(BODY)
    def answered(body: bytes) -> None:
        reply = client.post("/get_reward", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, (reply.status_code, reply.text)
        assert "Traceback" not in reply.text
        json.loads(reply.content)

    answered()


FILES = st.one_of(
    st.lists(RECORD.map(json.dumps), max_size=4).map("\n".join).map(str.encode),
    st.lists(RECORD, max_size=4).map(json.dumps).map(str.encode),
    st.binary(max_size=300),
    st.binary(max_size=50).map(b"PAR1".__add__),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_a_row_file_is_read_or_refused_by_every_reader(suffix, tmp_path):
    file = tmp_path / f"rows.{suffix}"
    readers = [read_row_file, read_pairs]

    @FUZZED
    @given(FILES, st.integers(min_value=0, max_value=len(readers) - 1))
    def read(content: bytes, which: int) -> None:
        file.write_bytes(content)
        # Any other error fails the test.
        with suppress(UserError):
            readers[which](str(file))

    read()

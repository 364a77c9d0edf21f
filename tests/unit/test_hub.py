import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from lmm_r1 import hub


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """Libraries that may ask the hub, and no earlier answer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


def test_a_hub_that_answers_anything_is_reachable(monkeypatch, tmp_path):
    class Refusing(SimpleHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(401)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.is_reachable()
        server.shutdown()
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_hub_that_does_not_answer_sends_the_libraries_to_their_caches(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub.is_reachable()
    assert huggingface_hub.constants.HF_HUB_OFFLINE


def test_the_hub_is_not_asked_when_the_user_is_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "no address")
    assert not hub.is_reachable()

"""What the reward server is compared with: math-verify in one process, and a plain Flask server on a process pool.

python benchmarks/reward_baselines.py --port-file FILE [--workers 2]     # the Flask server alone
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from flask import Flask, jsonify, request
from werkzeug.serving import make_server

MEMORY_BYTES = 4 * 2**30
"""Address space of a judging process, as in the reward server: a power tower must not take the machine down."""


def judge(response: str, label: str) -> float:
    """Return 1.0 where math-verify, with its own time limits, reads the label's value out of the whole response."""
    from math_verify import parse, verify

    return float(verify(parse(f"${label}$"), parse(response)))


class SingleProcess:
    """math-verify in one process of its own, which can be killed when an item never ends.

    The process starts with the object; `close` ends it.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._done = context.RawValue("i", 0)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_judge_lists, args=(theirs, self._done), daemon=True)
        self._process.start()

    def judge_all(
        self, pairs: Sequence[tuple[str, str]], *, deadline_s: float
    ) -> tuple[list[float], list[float]] | int:
        """Return the seconds and the verdict of each (response, label), or how many were done by the deadline.

        After an unfinished list the object is of no more use.
        """
        self._connection.send(list(pairs))
        if self._connection.poll(deadline_s):
            return self._connection.recv()
        self.close()
        return self._done.value

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def _judge_lists(connection: Connection, done) -> None:
    prepare_worker()
    while True:
        seconds, verdicts = [], []
        pairs = connection.recv()
        done.value = 0
        for response, label in pairs:
            began = time.perf_counter()
            verdicts.append(judge(response, label))
            seconds.append(time.perf_counter() - began)
            done.value += 1
        connection.send((seconds, verdicts))


def prepare_worker() -> None:
    """Limit the memory, and keep math-verify's warnings about its time limits off the terminal."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def create_flask_app(executor: ProcessPoolExecutor) -> Flask:
    """Return the application: POST /get_reward judges each response of the request in a process of the pool."""
    app = Flask("baseline")

    @app.post("/get_reward")
    def get_reward():
        body = request.get_json()
        return jsonify({"rewards": list(executor.map(judge, body["responses"], body["labels"]))})

    return app


def main() -> None:
    """Serve on a free port of 127.0.0.1, one thread per connection, until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port-file", type=Path, required=True, help="file to write the port to")
    parser.add_argument("--workers", type=int, default=2, help="judging processes")
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context, initializer=prepare_worker) as executor:
        server = make_server("127.0.0.1", 0, create_flask_app(executor), threaded=True)
        unfinished = arguments.port_file.with_suffix(".part")
        unfinished.write_text(f"{server.port}\n")
        unfinished.replace(arguments.port_file)
        server.serve_forever()


if __name__ == "__main__":
    main()

"""What Ray starts in place of a worker's Python: asks the server of `worker_processes` to become the worker, and waits for its end.

It is run as a script, and loads next to nothing.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Hand over the arguments, environment, folder and streams of this process."""
    path, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        # The server has ended with the driver of the run.
        os.execv(sys.executable, [sys.executable, *arguments])
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    sent = socket.send_fds(server, [text], [0, 1, 2])
    server.sendall(text[sent:])
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
    # A killed server sends no code.
    raise SystemExit(code[0] if code else 1)


if __name__ == "__main__":
    main()

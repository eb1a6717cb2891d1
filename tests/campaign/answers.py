"""A small server that a program of the campaign asks for each row."""

import functools
import os
import socketserver
import threading

ADDRESS_VARIABLE = "TALLYSTICK_CAMPAIGN_LOOKUPS"


def answer_of(question: str) -> str:
    """Return what the server says: nothing that another question is answered with."""
    return f"{question}:{hash_of(question)}"


def hash_of(question: str) -> int:
    """Return a number of a text, the same in each process."""
    return functools.reduce(lambda known, byte: known * 31 + byte, question.encode(), 7) % 1_000_003


class _Answers(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Answer line by line, in the order of the questions, as a database does."""
        for line in self.rfile:
            self.wfile.write(answer_of(line.decode().strip()).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def start_lookups() -> _Server:
    """Start the server, and tell programs of it."""
    server = _Server(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    os.environ[ADDRESS_VARIABLE] = f"{host!s}:{port}"
    return server

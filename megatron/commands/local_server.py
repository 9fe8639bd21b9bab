"""A page for this machine alone: the common part of its servers."""

import re
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from pathlib import Path
from typing import Any, Final

JSON: Final = "application/json"

_THIS_MACHINE: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)


def bound(port: int, handler: Callable[..., Any], option: str) -> ThreadingHTTPServer:
    """Return a server on this machine alone; ``serve_forever`` runs it.

    Args:
        port: of 127.0.0.1; 0 takes any that is free.
        handler: makes the handler of a connection.
        option: the flag that asks for the port.

    Raises:
        ValueError: there is no such port, or it is taken.
    """
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"{option} {port}: {error}: give another, or 0 for any") from error
    server.daemon_threads = True
    return server


class LocalHandler(BaseHTTPRequestHandler):
    """Answers a connection of a browser on this machine.

    A subclass has a method ``do_GET``, and perhaps ``do_POST``.
    """

    protocol_version = "HTTP/1.1"

    def is_foreign(self) -> bool:
        """Refuse a request for another host; return whether the request was for another host.

        A page of another site may make a name of its own mean this machine. Browsers then take
        our answers for that site's, and let it read them.
        """
        if _THIS_MACHINE.fullmatch(self.headers.get("Host", "")):
            return False
        told = "this server answers to the names localhost, 127.0.0.1 and [::1] alone"
        self.send_error(HTTPStatus.MISDIRECTED_REQUEST, explain=told)
        return True

    def send_file(self, file: Path) -> None:
        """Send a file of the page."""
        self.send(file.read_bytes(), guess_type(file.name)[0] or "application/octet-stream")

    def send(self, content: bytes, kind: str) -> None:
        """Send a whole answer, which the browser does not keep."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        try:
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:  # the reader has left, or asks something else
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the address."""

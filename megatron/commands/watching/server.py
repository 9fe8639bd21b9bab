"""Serve the live page on this machine: the files of the page, and its values as JSON."""

import json
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from megatron.commands.local_server import JSON, LocalHandler, bound
from megatron.commands.watching.page_data import View
from megatron.commands.watching.watched import Watched

_OWN: Final = Path(__file__).resolve().parent / "page"
_SHARED: Final = _OWN.parents[1] / "page"

VALUES: Final = "values.json"
"""The paths that the page asks for again and again."""


def page_file(name: str) -> Path:
    """Return the file of the page with a name.

    Raises:
        KeyError: there is none.
    """
    files = {file.name: file for folder in (_SHARED, _OWN) for file in folder.iterdir()}
    return files[name]


def make_server(port: int, watched: Watched) -> ThreadingHTTPServer:
    """Return a server on this machine alone; ``serve_forever`` runs it.

    Args:
        port: of 127.0.0.1; 0 takes any that is free.
        watched: the files whose values the page shows.

    Raises:
        ValueError: there is no such port, or it is taken.
    """
    return bound(port, partial(_Handler, watched), "--serve")


class _Handler(LocalHandler, BaseHTTPRequestHandler):
    """Answers one connection.

    Args:
        watched: the files whose values the page shows.
        connection: the connection that the server hands over.
    """

    def __init__(self, watched: Watched, *connection: Any) -> None:
        self._watched = watched
        super().__init__(*connection)  # answers all of its requests

    def do_GET(self) -> None:
        if self.is_foreign():
            return
        asked = urlsplit(self.path)
        name = asked.path.lstrip("/") or "index.html"
        if name == VALUES:
            self._send_values(dict(parse_qsl(asked.query)))
            return
        try:
            self.send_file(page_file(name))
        except KeyError:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_values(self, query: dict[str, str]) -> None:
        """Send all values, or only their version if the page has them already (``seen``)."""
        try:
            view = View.of_query(query)
        except ValueError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, explain=str(error))
            return
        if query.get("seen") == str(self._watched.version):
            found: dict[str, Any] = {"version": self._watched.version}
        else:
            found = self._watched.data(view)
        self.send(json.dumps(found, allow_nan=False).encode(), JSON)

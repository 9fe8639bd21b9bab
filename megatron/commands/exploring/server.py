"""Serve the explorer's page on this machine; Python answers over HTTP what the page asks.

Only the last request of a tab's channel matters: a newer one ends the search of an older one.
"""

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock
from typing import Any, Final

from megatron.commands.exploring.export import page_files
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.simulated import Simulations
from megatron.commands.local_server import JSON, LocalHandler, bound
from megatron.schedules.search.watch import Watch
from megatron.simulator.ways_folder import WaysFolder

LARGEST: Final = 64 << 20
"""Bytes of the largest request: a recorded timeline."""

_ENGINE: Final = json.dumps({"engine": "server"}).encode()
_DIGITS: Final = 18  # of a number of bytes; one that has more is larger than LARGEST


class SupersededError(ValueError):
    """A newer request has taken the place of this one."""


class InterruptibleWatch(Watch):
    """A watch that also ends a search whose answer is no longer wanted."""

    def __init__(self, seconds: float | None, superseded: Event) -> None:
        super().__init__(seconds)
        self._superseded = superseded

    @property
    def is_over(self) -> bool:
        """Whether the time is up.

        Raises:
            SupersededError: nobody waits for the search.
        """
        if self._superseded.is_set():
            raise SupersededError("a newer request has taken the place of this one")
        return super().is_over


class Channels:
    """Answers requests; on each channel the last one counts.

    Args:
        ways: ways of ``plan-pretraining`` to show; ``None``: there are none.
    """

    def __init__(self, ways: WaysFolder | None = None) -> None:
        self._ways = ways
        self._lock = Lock()
        self._running: dict[str, Event] = {}
        self._simulations = Simulations()

    def answer(self, channel: str, text: str) -> str:
        """Return the answer to a request; one that is under way on the channel ends.

        Args:
            channel: its name.
            text: of the request.
        """
        superseded = Event()
        with self._lock:
            if channel in self._running:
                self._running[channel].set()
            self._running[channel] = superseded
        try:
            return answer(
                text,
                self._simulations,
                lambda seconds: InterruptibleWatch(seconds, superseded),
                self._ways,
            )
        finally:
            with self._lock:
                if self._running.get(channel) is superseded:
                    del self._running[channel]

    def is_busy(self, channel: str) -> bool:
        """Whether a request is under way."""
        return channel in self._running


def make_server(port: int, ways: WaysFolder | None = None) -> ThreadingHTTPServer:
    """Return a server on this machine alone; ``serve_forever`` runs it.

    Args:
        port: of 127.0.0.1; 0 takes any that is free.
        ways: ways of ``plan-pretraining`` to show; ``None``: there are none. The page asks for a
            way by its number, so nothing else of the machine's files can be asked for.

    Raises:
        ValueError: there is no such port, or it is taken.
    """
    return bound(port, partial(_Handler, Channels(ways).answer), "--port")


def _number_of_bytes(text: str | None) -> int | None:
    """Return the value of a header ``Content-Length``; ``None`` if it is none."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) <= _DIGITS else LARGEST + 1


class _Handler(LocalHandler, BaseHTTPRequestHandler):
    """Answers one connection.

    Args:
        answered: returns the answer to a channel's request.
        connection: the connection that the server hands over.
    """

    def __init__(self, answered: Callable[[str, str], str], *connection: Any) -> None:
        self._answered = answered
        super().__init__(*connection)  # answers all of its requests

    def do_GET(self) -> None:
        if self.is_foreign():
            return
        name = self.path.split("?")[0].lstrip("/") or "index.html"
        if name == "engine.json":
            self.send(_ENGINE, JSON)
            return
        file = next((file for file in page_files() if file.name == name), None)
        if file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_file(file)

    def do_POST(self) -> None:
        if self.is_foreign():
            return
        # Pages of other sites cannot send this type without asking, and are not answered.
        if self.path != "/explore" or self.headers.get("Content-Type") != JSON:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        length = _number_of_bytes(self.headers.get("Content-Length"))
        if length is None:
            told = "Content-Length must be the number of bytes of the request's body"
            self.send_error(HTTPStatus.BAD_REQUEST, explain=told)
            return
        if length > LARGEST:
            told = f"a request has at most {LARGEST:,} bytes"
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, explain=told)
            return
        text = self.rfile.read(length).decode("utf-8", "replace")
        channel = self.headers.get("X-Channel", "")
        self.send(self._answered(channel, text).encode(), JSON)

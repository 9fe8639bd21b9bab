"""A page on this machine, for as long as a test looks at it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Let a server answer in a thread of its own, and close it at the end; yield its address."""
    with server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()

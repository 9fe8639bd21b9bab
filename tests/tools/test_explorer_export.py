"""The exported folder is complete: its Python needs the archive and the standard library alone."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import urlsplit
from zipfile import ZipFile

import pytest
from harness.serving import serving

from megatron.commands.explore_schedules import main
from megatron.commands.exploring.export import PYODIDE_FILES, ROOT, page_files, write_archive
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.server import (
    LARGEST,
    Channels,
    InterruptibleWatch,
    SupersededError,
    make_server,
)
from megatron.commands.exploring.simulated import Simulations
from tools.explorer_cases import CASES

ISOLATED: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.simulated import Simulations
simulations = Simulations()
for request in sys.stdin:
    print(answer(request, simulations))
ours = [module for name, module in sys.modules.items() if name.startswith(("megatron.", "tools."))]
files = [module.__file__ for module in ours if getattr(module, "__file__", None)]
assert files and all(file.startswith(sys.argv[1]) for file in files), files
"""


@pytest.fixture
def pyodide(tmp_path: Path) -> Path:
    """A folder with the names of Pyodide's files."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name in PYODIDE_FILES:
        (folder / name).write_text(name)
    return folder


def test_the_archive_alone_answers_as_the_checkout_does(tmp_path: Path) -> None:
    write_archive(tmp_path / "python.zip")
    asked = [{"action": "facts"}, {"action": "draw", "case": CASES["usual"]}]
    quick = ("usual", "redistributed", "interlaced", "of its ranks", "of a model")
    asked += [{"action": "simulate", "case": CASES[name]} for name in quick]
    asked += [{"action": "recorded", "text": "{}", "case": {}}, {"action": "point", "case": {}}]
    lines = [json.dumps(request) for request in asked]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ISOLATED, str(tmp_path / "python.zip")],
        input="\n".join(lines), capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    simulations = Simulations()
    assert done.stdout.splitlines() == [answer(line, simulations) for line in lines]


def test_the_archive_has_only_modules_that_are_needed(tmp_path: Path) -> None:
    write_archive(tmp_path / "python.zip")
    write_archive(tmp_path / "again.zip")
    assert (tmp_path / "python.zip").read_bytes() == (tmp_path / "again.zip").read_bytes()
    with ZipFile(tmp_path / "python.zip") as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            assert archive.read(name) == (ROOT / name).read_bytes()
    rooms = {"/".join(name.split("/")[:2]) for name in names}
    known = ("commands", "flags", "native", "schedules", "simulator")
    assert rooms == {f"megatron/{name}" for name in known}


def test_the_folder_has_all_that_the_page_asks_for(tmp_path: Path, pyodide: Path) -> None:
    main(["--export", str(tmp_path / "site"), "--pyodide", str(pyodide)])
    written = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*")}
    own = {path.name for path in page_files()}
    parts = {"engine.json", "python.zip", "pyodide", *(f"pyodide/{name}" for name in PYODIDE_FILES)}
    assert written == own | parts
    text = "".join(path.read_text(encoding="utf-8") for path in page_files())
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


def test_a_folder_that_is_no_pyodide_is_refused(
    tmp_path: Path, pyodide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pyodide / "pyodide.asm.wasm").unlink()
    with pytest.raises(SystemExit, match=r"has no pyodide.asm.wasm: give the folder 'package'"):
        main(["--export", str(tmp_path / "site"), "--pyodide", str(pyodide)])
    with pytest.raises(SystemExit, match="2"):
        main(["--pyodide", str(pyodide)])
    assert "has no effect by itself: add --export" in capsys.readouterr().err


def test_without_npm_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs npm: install npm, or unpack the package elsewhere"):
        main(["--export", str(tmp_path / "site")])


@pytest.fixture
def connection() -> Iterator[HTTPConnection]:
    with serving(make_server(0)) as address:
        made = HTTPConnection(urlsplit(address).netloc, timeout=30)
        yield made
        made.close()


def test_a_port_that_cannot_be_had_is_refused(connection: HTTPConnection) -> None:
    for port in (str(connection.port), "99999"):
        with pytest.raises(SystemExit, match=f"--port {port}: .*give another, or 0 for any"):
            main(["--port", port])


def fetch(
    connection: HTTPConnection, path: str, body: str | None = None, kind: str = "application/json"
) -> tuple[int, str, bytes]:
    headers = {} if body is None else {"Content-Type": kind, "X-Channel": "test"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    return response.status, response.getheader("Content-Type") or "", response.read()


def test_the_server_gives_the_page_and_the_same_answers(connection: HTTPConnection) -> None:
    for path in page_files():
        status, kind, content = fetch(connection, f"/{path.name}")
        assert (status, content) == (200, path.read_bytes())
        assert path.suffix != ".js" or "javascript" in kind  # browsers refuse modules otherwise
    [index] = (path for path in page_files() if path.name == "index.html")
    assert fetch(connection, "/")[2] == index.read_bytes()
    assert json.loads(fetch(connection, "/engine.json")[2]) == {"engine": "server"}
    request = json.dumps({"action": "simulate", "case": CASES["usual"]})
    status, _, content = fetch(connection, "/explore", request)
    assert (status, content.decode()) == (200, answer(request, Simulations()))


def test_the_server_gives_nothing_else(connection: HTTPConnection) -> None:
    for path in ("/../interface.py", "/interface.py", "/page/index.html", "/%2e%2e/case.py"):
        assert fetch(connection, path)[0] == 404
    request = json.dumps({"action": "facts"})
    assert fetch(connection, "/explore", request, "text/plain")[0] == 404  # as other sites can
    assert fetch(connection, "/other", request)[0] == 404


def raw(connection: HTTPConnection, request: bytes) -> bytes:
    """Send bytes as they are; return all that comes back until the server closes."""
    with socket.create_connection((connection.host, connection.port), timeout=60) as peer:
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: peer.recv(1 << 16), b""))


HEAD = "POST /explore HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("", 400),
        ("Content-Length: x", 400),
        ("Content-Length: -5", 400),
        ("Content-Length: +2", 400),
        ("Content-Length: 1_0", 400),
        ("Content-Length: \u0663".encode().decode("latin-1"), 400),
        ("Transfer-Encoding: chunked", 400),
        (f"Content-Length: {'9' * 5000}", 413),
        (f"Content-Length: {LARGEST + 1}", 413),
    ],
)
def test_a_bad_length_has_one_answer(length: str, status: int, connection: HTTPConnection) -> None:
    """What follows is no further request: the connection ends."""
    header = f"{length}\r\n" if length else ""
    answered = raw(connection, f"{HEAD}{header}\r\nGET / HTTP/1.1\r\n\r\n".encode("latin-1"))
    assert answered.startswith(f"HTTP/1.1 {status} ".encode())
    assert answered.count(b"HTTP/1.1 ") == 1
    assert (b"number of bytes" if status == 400 else b"at most 67,108,864 bytes") in answered


def test_a_request_that_is_cut_short_is_answered(connection: HTTPConnection) -> None:
    answered = raw(connection, f'{HEAD}Content-Length: 99\r\n\r\n{{"act'.encode())
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert b'{"error": "' in answered


@pytest.mark.parametrize("method", ["GET /", "POST /explore"])
@pytest.mark.parametrize("name", ["", "example.org", "localhost.example.org:80", "127.0.0.1@x"])
def test_a_foreign_host_is_not_served(name: str, method: str, connection: HTTPConnection) -> None:
    """A page of another site may make its own name mean this machine, and then read answers."""
    host = f"Host: {name}\r\n" if name else ""
    answered = raw(connection, f"{method} HTTP/1.1\r\n{host}\r\n".encode())
    assert answered.startswith(b"HTTP/1.1 421 ")
    assert b"localhost, 127.0.0.1 and [::1] alone" in answered


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8017", "127.0.0.1:1", "[::1]:9"])
def test_all_names_of_this_machine_are_served(name: str, connection: HTTPConnection) -> None:
    answered = raw(connection, f"GET /engine.json HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
    assert answered.startswith(b"HTTP/1.1 200 ")


def test_a_newer_request_ends_an_older_search() -> None:
    channels, answers = Channels(), dict[str, Mapping[str, Any]]()
    slow = json.dumps({"action": "simulate", "case": {"schedule": "zb-1p", "p": 12, "m": 400}})
    quick = json.dumps({"action": "facts"})
    older = Thread(target=lambda: answers.update(older=json.loads(channels.answer("one", slow))))
    older.start()
    while not channels.is_busy("one"):
        time.sleep(0.01)
    channels.answer("other", quick)
    channels.answer("one", quick)
    older.join(timeout=60)
    assert "has taken the place" in answers["older"]["error"]


def test_an_interrupted_watch_ends_the_search() -> None:
    superseded = Event()
    watch = InterruptibleWatch(None, superseded)
    assert not watch.is_over
    superseded.set()
    with pytest.raises(SupersededError):
        _ = watch.is_over

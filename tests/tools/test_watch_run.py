"""The command watch-run: which files it takes, what it serves, and the page in one file."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from harness.serving import serving

from megatron.commands.watch_run import main
from megatron.commands.watching.page_data import View
from megatron.commands.watching.promise import Promise
from megatron.commands.watching.server import make_server
from megatron.commands.watching.sources import records_files
from megatron.commands.watching.static_page import embedded, static_page
from megatron.commands.watching.watched import Watched
from tools.watch_records import evaluation, generation, interval, start, write

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&<!--"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl", start(), interval(5), evaluation(5), interval(10))


class Elements(HTMLParser):
    """The elements of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def test_a_page_in_one_file_has_the_values_and_needs_no_other_file(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.html"
    main([str(records), "-o", str(output)])
    assert capsys.readouterr().out == f"wrote {output}: 1 run, 4 records\n"
    text = output.read_text(encoding="utf-8")
    page = Elements(text)
    assert page.addresses == []
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    values, script = page.scripts
    assert json.loads(values)["runs"][0]["curves"]["loss"][0]["y"] == [9.5, 9.0]
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    assert "default-src 'none'" in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    odd = tmp_path / "<b>&.jsonl"
    made = [start(run=HOSTILE), interval(5, HOSTILE), evaluation(5, HOSTILE, dataset=HOSTILE)]
    made.append(generation(5, HOSTILE, texts=[{"prompt": HOSTILE, "text": HOSTILE}]))
    watched = Watched(records_files([write(odd, *made)], may_come=False))
    watched.read_all()
    values = watched.data(View())
    assert list(values["runs"][0]["evaluations"]) == [HOSTILE[:80]]
    page, plain = (Elements(static_page(own)) for own in (values, {}))
    assert page.tags == plain.tags
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(values))


def test_sums_beyond_every_number_are_not_shown(tmp_path: Path) -> None:
    large = 1.7e308
    made = [interval(step, skipped=large, seconds_per_iteration=large) for step in (5, 10)]
    watched = Watched(records_files([write(tmp_path / "a.jsonl", start(), *made)], may_come=False))
    watched.read_all()
    values = watched.data(View())
    json.dumps(values, allow_nan=False)
    assert values["runs"][0]["totals"]["skipped"] is None


def test_values_within_a_page_are_read_as_they_were() -> None:
    value = {"text": HOSTILE + "\u2028\ud800", "number": [1.5, None]}
    assert json.loads(embedded(value)) == value
    assert not set("<>&") & set(embedded(value))


def test_a_folder_has_all_files_of_records_in_it(records: Path, tmp_path: Path) -> None:
    write(tmp_path / "other.jsonl", start())
    (tmp_path / "text.jsonl").write_text('{"text": "of a corpus"}\n')
    (tmp_path / "iter_0000010").mkdir()
    found = records_files([tmp_path, records], may_come=False)
    assert [file.name for file in found] == ["other.jsonl", "run.jsonl"]
    deeper = tmp_path / "iter_0000010/run.jsonl"
    write(deeper, start())
    found = records_files([records, deeper], may_come=False)
    assert [file.name for file in found] == [f"{tmp_path.name}/run.jsonl", "iter_0000010/run.jsonl"]


def test_all_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other.txt"
    empty.mkdir()
    other.write_text("notes\n")
    words = [str(own) for own in (empty, other, tmp_path / "none.jsonl", Path("/dev/null"))]
    with pytest.raises(SystemExit) as ended:
        main([*words, "-o", str(tmp_path / "page.html")])
    first, *told = str(ended.value).splitlines()
    assert first == "error:"
    assert told[0].startswith(f"{empty}: the folder holds no records: ")
    assert told[0].endswith("name the file that --log-jsonl has written elsewhere")
    assert told[1].startswith(f"{other}: the file holds something else than the records of a run")
    assert told[2].startswith(f"{tmp_path / 'none.jsonl'}: there is no such file or folder: name")
    assert told[3].startswith("/dev/null: it is neither a file nor a folder: name")
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_has_not_begun_can_be_watched(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    watched = Watched(records_files([path], may_come=True))
    watched.read_all()
    assert watched.data(View())["notes"] == [
        "run.jsonl: the file cannot be read now: No such file or directory."
    ]
    write(path, start())
    watched.read_all()
    assert watched.data(View())["notes"] == []
    assert len(watched.data(View())["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "RUN is missing"),
        (["r.jsonl", "--serve", "0", "-o", "p.html"], "--serve"),
        (["--serve", "r.jsonl"], "--serve r.jsonl: must be a port, 0 to 65535; RUN stands before"),
        (["r.jsonl", "--serve", "1", "2"], "--serve 1 2: give one port"),
        (["r.jsonl", "--serve", "65536"], "must be a port, 0 to 65535"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert fault in capsys.readouterr().err


def test_a_page_does_not_take_the_place_of_records(records: Path) -> None:
    before = records.read_bytes()
    with pytest.raises(SystemExit, match=r"--output .*: this file holds the records: give another"):
        main([str(records), "-o", str(records.parent / "../" / records.parent.name / "run.jsonl")])
    assert records.read_bytes() == before


PLAN: dict[str, Any] = {
    "gpus": {"name": "H100", "count": 2},
    "taken": {
        "seconds": 10.0, "tokens_per_second": 100.0, "mfu": 0.4, "bytes": 1 << 30,
        "schedule": "1f1b", "vocabulary": "vocab-2",
        "seconds_by_reason": {
            "products": 6.0, "vocabulary": 0.5, "idle": 1.5, "optimizer's step": 2.0, "host": 0.0,
        },
    },
}  # fmt: skip


def test_a_plan_stands_beside_the_run(records: Path, tmp_path: Path) -> None:
    plan, output = tmp_path / "plan.json", tmp_path / "page.html"
    plan.write_text(json.dumps(PLAN))
    main([str(records), "-o", str(output), "--plan", str(plan)])
    values = json.loads(Elements(output.read_text()).scripts[0])
    assert values["promise"] == {
        "name": "plan.json",
        "ranks": 2,
        "figures": {
            "seconds": 10.0, "tokens_per_second": 100.0, "mfu": 0.4, "bytes": 1 << 30,
            "idle": 2.0 / 8.0,
        },
        "reasons": {"products": 6.0, "optimizer's step": 2.0, "idle": 1.5, "vocabulary": 0.5},
        "schedule": "1f1b, vocab-2",
    }  # fmt: skip
    promises = {own["name"]: own["promise"] for own in values["charts"] if own["promise"]}
    assert set(promises.values()) <= values["promise"]["figures"].keys()
    assert values["runs"][0]["usual"]["seconds_per_iteration"] == 2.0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"taken": {"seconds": 0}}', "[" * 10000])
def test_what_is_no_plan_is_refused(text: str, records: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    way_out = "give the file that plan-pretraining --json has printed"
    with pytest.raises(SystemExit, match=f"^error: --plan {plan}: .*{way_out}$"):
        main([str(records), "-o", str(tmp_path / "page.html"), "--plan", str(plan)])
    with pytest.raises(ValueError, match=way_out):
        Promise.read(tmp_path / "none.json")


@pytest.fixture
def connection(records: Path) -> Iterator[HTTPConnection]:
    watched = Watched(records_files([records], may_come=True))
    watched.read_all()
    with serving(make_server(0, watched)) as address:
        made = HTTPConnection(urlsplit(address).netloc, timeout=30)
        yield made
        made.close()


def fetch(connection: HTTPConnection, path: str, **headers: str) -> tuple[int, bytes]:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_server_gives_the_page_and_its_values(connection: HTTPConnection) -> None:
    page = fetch(connection, "/")[1].decode()
    for address in Elements(page).addresses:
        assert fetch(connection, f"/{address}")[0] == 200
    status, content = fetch(connection, "/values.json?axis=tokens&from=6000&to=9e9&points=100")
    values = json.loads(content)
    assert (status, values["axis"]) == (200, "tokens")
    assert values["runs"][0]["curves"]["loss"][0]["tokens"] == [5120, 10240]
    seen = fetch(connection, f"/values.json?seen={values['version']}")
    assert json.loads(seen[1]) == {"version": values["version"]}


def test_the_server_gives_nothing_else(connection: HTTPConnection) -> None:
    for path in ("/run.jsonl", "/../server.py", "/page/index.html", "/%2e%2e/run.py", "/values"):
        assert fetch(connection, path)[0] == 404
    for query in ("axis=x", "from=2&to=1", "from=nan", "points=x", "from=" + "9" * 5000 + "x"):
        assert fetch(connection, f"/values.json?{query}")[0] == 400
    assert fetch(connection, "/values.json", Host="example.org")[0] == 421


def test_a_port_that_is_taken_is_told(connection: HTTPConnection, records: Path) -> None:
    with pytest.raises(SystemExit, match=f"--serve {connection.port}: .*give another, or 0 for"):
        main([str(records), "--serve", str(connection.port)])


def test_records_that_come_while_the_page_is_open_are_read(records: Path) -> None:
    watched = Watched(records_files([records], may_come=True))
    with closing(watched):
        watched.follow()
        write(records, start(), interval(5), evaluation(5), interval(10), interval(15))
        while [own["iteration"] for own in watched.data(View())["runs"]] != [15]:
            assert watched._thread.is_alive()
            time.sleep(0.05)
    assert not watched._thread.is_alive()

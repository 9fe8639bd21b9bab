"""Corpora that every split has of its own: their flags, their files, what is said about them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed import IndexedWriter
from megatron.data.settings import DataSettings, DocumentSettings
from megatron.data.shares import OwnPaths, Share
from megatron.run.command_line import parse, read
from megatron.run.run_config import RunConfig

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 4 --device cpu --tokenizer-type NullTokenizer --vocab-size 99"
)
Run = Callable[..., RunConfig]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Parses flags beside the least that there must be; corpora a, b and c lie here."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        with IndexedWriter(tmp_path / name, 100) as writer:
            for document in range(20):
                writer.add_document([document, document + 1, 99])

    def parsed(flags: str, *words: str) -> RunConfig:
        return parse([*BASE.split(), *flags.split(), *words], world_size=1)

    return parsed


def whole(*names: str) -> tuple[Share, ...]:
    return tuple(Share(1.0, Path(name)) for name in names)


def test_messages_name_the_flag_of_every_corpus(run: Run, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 a 2 b")
    (tmp_path / "other").write_text("0.3 a 2 b")
    plain = run("--data-path a").data
    assert plain.flag_of(Path("a")) == plain.flag_of(Path("unknown")) == "--data-path"
    own = run("--train-data-path a --valid-data-path b --eval-interval 2").data
    assert [own.flag_of(Path(name)) for name in "ab"] == ["--train-data-path", "--valid-data-path"]
    listed, elsewhere = (run(f"--data-args-path {name}").data for name in ("words", "other"))
    assert listed.flag_of(Path("b")) == "--data-args-path:"
    assert listed == elsewhere, "the file may lie elsewhere on another machine"


def test_every_split_reads_its_own_corpora(run: Run) -> None:
    config = run("--train-data-path 0.3 a 2 b --valid-data-path c --eval-interval 2")
    train = Share(0.3, Path("a")), Share(2.0, Path("b"))
    assert config.data.own_paths == OwnPaths(train, (whole("c"),))
    assert config.data.blend == ()
    assert config.train.final_sets == ("validation",)
    assert config.train.eval_interval == 2
    assert config.notes == ()


def test_a_test_set_alone_is_evaluated_at_the_end(run: Run) -> None:
    config = run("--train-data-path a --test-data-path c --eval-interval 2")
    assert config.train.final_sets == ("test",)
    assert config.train.eval_interval is None


def test_a_blend_in_a_file(run: Run) -> None:
    Path("blend").write_text("0.25 a\n 3 b\n")
    config = run("--data-args-path blend")
    assert config.data.blend == ((0.25, Path("a")), (3.0, Path("b")))
    assert config.data.own_paths is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train": "a"}, OwnPaths(whole("a"))),
        ({"train": ["a"], "valid": [], "test": None}, OwnPaths(whole("a"))),
        (
            {"train": [0.5, "a", 1, "b"], "valid": "c", "test": "2 a 2 b"},
            OwnPaths(
                (Share(0.5, Path("a")), Share(1.0, Path("b"))),
                (whole("c"),),
                (Share(2.0, Path("a")), Share(2.0, Path("b"))),
            ),
        ),
    ],
    ids=["text", "empty", "all"],
)
def test_splits_in_a_file(run: Run, content: Any, expected: OwnPaths) -> None:
    Path("splits.json").write_text(json.dumps(content))
    assert run("--per-split-data-args-path splits.json").data.own_paths == expected


def test_several_validation_sets_are_numbered(run: Run) -> None:
    config = run("--train-data-path a --valid-data-path b c --multiple-validation-sets")
    sets = whole("b"), whole("c")
    assert config.data.own_paths == OwnPaths(whole("a"), sets, valid_names=("0", "1"))


def test_weighted_shares_of_corpora(run: Run) -> None:
    Path("valid").write_text('"one: 1 0.9:0.95 a" "two: 0.3 0.95:1 a, 0.7 0:1 c"\n')
    config = run(
        "--valid-weighted-split-paths-path valid --train-weighted-split-paths",
        "train: 1 0:0.9 a, 2.5 0:1 b",
    )
    assert config.data.own_paths == OwnPaths(
        (Share(1.0, Path("a"), 0.0, 0.9), Share(2.5, Path("b"), 0.0, 1.0)),
        (
            (Share(1.0, Path("a"), 0.9, 0.95),),
            (Share(0.3, Path("a"), 0.95, 1.0), Share(0.7, Path("c"), 0.0, 1.0)),
        ),
        valid_names=("one", "two"),
    )


REFUSED = [
    ("--train-data-path a --data-path b", "--train-data-path a", "leave the other out"),
    ("--data-args-path none", "--data-args-path none cannot be read", "give a text file"),
    ("--data-args-path empty", "--data-args-path empty is empty", "write [WEIGHT] PREFIX"),
    ("--data-args-path odd", "--data-args-path odd 1 a 2: 3 words make no", "before every prefix"),
    ("--per-split-data-args-path odd", "--per-split-data-args-path odd is no JSON", '{"train"'),
    ("--per-split-data-args-path list", "list holds something else", '{"train": ["PREFIX"]'),
    ("--per-split-data-args-path other", "other holds something else", '{"train": ["PREFIX"]'),
    ("--per-split-data-args-path number", "number: train is neither", '{"train": ["PREFIX"]'),
    ("--per-split-data-args-path untrained", "untrained, train is missing", "to train on"),
    ("--valid-data-path a", "--train-data-path is missing", "give the corpora to train on"),
    ("--train-data-path a --valid-data-path none", "--valid-data-path none:", "none"),
    (
        "--train-data-path a --valid-data-path 1 b 1 c --multiple-validation-sets",
        "--valid-data-path: '1' looks like a weight",
        "give prefixes only",
    ),
    ("--data-path a --multiple-validation-sets", "--multiple-validation-sets", "add --valid-data"),
    (
        "--train-data-path a --valid-data-path 1 b 1 c --full-validation --eval-interval 1",
        "--full-validation reads every corpus once",
        "--multiple-validation-sets",
    ),
    (
        "--data-path 1 b 1 c --full-validation --eval-interval 1",
        "--full-validation reads every corpus once",
        "--valid-data-path",
    ),
    ("--mock-data --full-validation --eval-interval 1", "--full-validation", "leave the other out"),
    ("--data-path a --num-workers -1", "--num-workers -1", "at least 0"),
    ("--data-path a --num-workers 1000000000", "--num-workers 1000000000", "at most 1,024"),
    ("--train-data-path a --multiple-validation-sets", "--multiple-validation-sets", "add --valid"),
    (
        "--train-weighted-split-paths-path valid --valid-weighted-split-paths-path blended "
        "--full-validation --eval-interval 1",
        "--full-validation reads every corpus once",
        "one corpus in each group",
    ),
    ("--valid-weighted-split-paths-path groups", "--train-weighted-split-paths is missing", "give"),
    ("--train-weighted-split-paths-path groups", "has 2 groups, and one is read", "give"),
    ("--train-weighted-split-paths-path nameless", "'1 a' has no name", "give 'NAME: WEIGHT"),
    ("--train-weighted-split-paths-path short", "'1 a' is no share", "give 'NAME: WEIGHT"),
    ("--train-weighted-split-paths-path falling", "'1 0.5:0.5 a'", "rise within 0 and 1"),
    (
        "--train-weighted-split-paths-path none",
        "--train-weighted-split-paths-path none cannot be read",
        "give a text file",
    ),
    (
        f"--train-data-path a --valid-data-path {'1' * 300} --multiple-validation-sets",
        f"--valid-data-path: '{'1' * 199}...",
        "give prefixes only",
    ),
    ("--train-weighted-split-paths-path open", "No closing quotation", "in quotes"),
]


@pytest.mark.parametrize(("flags", "begin", "way_out"), REFUSED)
def test_refused_with_the_way_out(run: Run, flags: str, begin: str, way_out: str) -> None:
    files = {
        "empty": "\n",
        "odd": "1 a 2",
        "list": "[1]",
        "other": '{"train": "a", "validation": "b"}',
        "number": '{"train": {"a": 1}}',
        "untrained": '{"valid": "a"}',
        "groups": '"x: 1 0:1 a" "x: 1 0:1 b"',
        "nameless": '"1 a"',
        "short": '"x: 1 a"',
        "falling": '"x: 1 0.5:0.5 a"',
        "open": '"x: 1 0:1 a',
        "valid": '"x: 1 0:1 a"',
        "blended": '"x: 1 0:1 a, 1 0:1 b"',
    }
    for name, text in files.items():
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(begin)) as caught:
        run(flags)
    [told] = str(caught.value).splitlines()
    assert begin in told
    assert way_out in told[told.index(begin) :]


def test_two_sets_of_one_name_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match=r"two groups have one name.*name every set differently"):
        run(
            "--train-weighted-split-paths",
            "x: 1 0:1 a",
            "--valid-weighted-split-paths",
            "x: 1 0:1 a",
            "x: 1 0:1 b",
        )


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--train-data-path a --split 8,1,1", "--split 8,1,1 changes nothing with --train-data"),
        ("--train-data-path a --eval-interval 2", "--eval-interval 2 changes nothing: there is no"),
        ("--data-path a --full-validation", "--full-validation changes nothing without --eval-in"),
        (
            "--data-path a --full-validation --eval-interval 2 --eval-iters 0",
            "--full-validation changes nothing with --eval-iters 0",
        ),
        (
            "--data-path a --reset-position-ids --position-embedding-type alibi",
            "--reset-position-ids changes nothing with --position-embedding-type alibi",
        ),
    ],
)
def test_what_changes_nothing_is_noted(run: Run, flags: str, note: str) -> None:
    assert any(told.startswith(note) for told in run(flags).notes)


def test_sets_with_names_are_told_apart_anyway(run: Run) -> None:
    config = run(
        "--multiple-validation-sets --eval-interval 2 --train-weighted-split-paths",
        *("x: 1 0:1 a", "--valid-weighted-split-paths", "y: 1 0:1 a", "z: 1 0:1 b"),
    )
    assert config.data.own_paths is not None
    assert config.data.own_paths.valid_names == ("y", "z")
    note = "--multiple-validation-sets changes nothing with --valid-weighted-split-paths"
    assert note in config.notes


def test_nothing_to_evaluate_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="--skip-train evaluates nothing: give the documents"):
        run("--train-data-path a --skip-train --load x")


def test_a_dry_run_reads_no_file() -> None:
    for flag in ("--data-args-path", "--per-split-data-args-path"):
        parse([*BASE.split(), "--bf16", "--dry-run", flag, "not-here"], world_size=1)


def test_documents_in_samples(run: Run) -> None:
    assert run("--data-path a").data.documents is None
    assert run("--data-path a --reset-position-ids").data.documents == DocumentSettings(
        reset_attention_mask=False, reset_position_ids=True, eod_token=99
    )
    config = run("--data-path a --reset-attention-mask --reset-position-ids --eod-mask-loss")
    assert config.data.documents == DocumentSettings(True, True, 99)
    assert config.data.eod_mask_loss


@pytest.mark.parametrize(
    ("flags", "on_gpu", "expected"),
    [
        ("", False, False),
        ("", True, True),
        ("--num-workers 2", False, True),
        ("--num-workers 0", True, False),
    ],
)
def test_workers_read_ahead(flags: str, on_gpu: bool, expected: bool) -> None:
    words = [*BASE.split(), "--mock-data", *flags.split()]
    assert read(words, 1).flags[DataSettings].reads_ahead(on_gpus=on_gpu) == expected

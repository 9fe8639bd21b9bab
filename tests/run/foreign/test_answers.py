"""Answers to flags that do not exist here: each flag has one, whatever its values and the line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.flags.words import SortedWords, spelling
from megatron.run.foreign.answers import (
    ANSWERS,
    FEATURES,
    Answer,
    Answers,
    blocks_of,
    features_of,
)
from megatron.run.foreign.line import Line
from megatron.run.log import SCHEDULE_PROFILE_ITERATIONS
from megatron.run.topics import DECLARED
from megatron.run.words import sort_words

MEGATRON = [
    (spelling(option), form)
    for option, _, form in (
        line.partition(" ")
        for line in (Path(__file__).parent / "megatron_flags.txt").read_text("utf-8").splitlines()
    )
]
"""Megatron-LM's flags (core 0.16 and before) for GPTs, each with the form of its values."""

EMPTY = Line({})
OPPOSITE = Line(
    {
        "--tensor-model-parallel-size": ["2"],
        "--context-parallel-size": ["2"],
        "--fp16": [],
        "--fp8-format": ["hybrid"],
        "--save": ["x"],
        "--load": ["x"],
        "--tensorboard-dir": ["x"],
        "--recompute-granularity": ["full"],
        "--num-experts": ["8"],
        "--profile": [],
    },
    world_size=64,
)
"""Where most conditions of the tables do not hold that hold on an empty line."""


TIMERS = (("schedule-timer", ""), ("zero-bubble-pipeline-timers", "-iter"))
"""The flags of forks that time passes: before and behind "-start"."""


def sort(words: str, world_size: int = 1) -> SortedWords:
    return sort_words(words.split(), DECLARED, world_size)


def samples(form: str) -> Iterator[list[str]]:
    """Values of a form."""
    if form.startswith("{"):
        yield from ([word] for word in form.strip("{}").split(","))
    elif ">" in form:
        yield [str(int(form.split(">")[1]) + 1)]
    else:
        yield ["1"] * len(form.replace("[...]", "").replace("...", "").split())


@pytest.mark.parametrize(("option", "form"), MEGATRON, ids=[option for option, _ in MEGATRON])
def test_every_flag_of_megatron_has_an_answer_or_is_ours(option: str, form: str) -> None:
    for values in samples(form):
        for line in (EMPTY, OPPOSITE):
            if option not in DECLARED:
                assert ANSWERS.to(option, values, line) is not None
            elif form.startswith("{") and DECLARED[option].unreadable(values):
                assert ANSWERS.to_ours(option, values, line) is not None


@pytest.mark.parametrize("option", [option for option in ANSWERS.exact if option not in DECLARED])
def test_a_form_of_values_that_is_known_has_an_answer_on_every_line(option: str) -> None:
    for answer in ANSWERS.of(option):
        for values in samples(answer.form):
            for line in (EMPTY, OPPOSITE):
                assert ANSWERS.to(option, values, line) is not None, (option, values)


def test_no_answer_stands_behind_one_that_takes_all_of_its_values() -> None:
    for option, some in ANSWERS.exact.items():
        for place, answer in enumerate(some):
            before = [other for other in some[:place] if not other.where]
            for values in samples(answer.form):
                taken = [other for other in before if other.takes(values)]
                assert not taken or answer.form in ("N", "N ..."), (option, values)


def test_an_answer_to_one_of_our_flags_is_for_some_of_its_values_or_lines_only() -> None:
    """Whoever builds a flag takes it out of the tables, which are about others."""
    whole = [o for o, a in ANSWERS.rows if not (a.where or a.form[:1] == "{" or ">" in a.form)]
    assert not [option for option in whole if option in DECLARED]


def test_other_names_are_read_as_flags_of_ours() -> None:
    line = Line({"--num-attention-heads": ["8"], "--seq-length": ["2"], "--train-tokens": ["64"]})
    for option, answer in ANSWERS.rows:
        if answer.kind == "rewritten":
            for values in samples(answer.form):
                words = answer.words(values, line)
                if answer.is_name and DECLARED[words[0]].choices and words[1:] == values:
                    words[1:] = DECLARED[words[0]].choices[:1]
                found = sort(" ".join(words))
                assert not found.mistakes, (option, found.mistakes)
                assert found.given


def test_features_have_names_of_their_own_and_a_way_out() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    for feature in FEATURES:
        lack, _, way_out = feature.reason.partition("; ")
        assert lack
        assert way_out
        assert list(feature.refused)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("", [[]], [["1"]]),
        ("N", [["1"], ["a"]], [[], ["1", "2"]]),
        ("{a,b}", [["a"], ["b"]], [["c"], [], ["a", "b"]]),
        ("N>1", [["2"], ["1.5"]], [["1"], ["x"], []]),
        ("N ...", [["1"], ["1", "2"]], [[]]),
        ("[...]", [[], ["1"], ["1", "2"]], []),
    ],
)
def test_forms(form: str, good: list[list[str]], bad: list[list[str]]) -> None:
    answer = Answer("noted", "", form)
    assert all(answer.takes(values) for values in good)
    assert not any(answer.takes(values) for values in bad)


TABLE = """What stands before the rule is for people.

noted: no answer
--a-b N
==========
read as: --ours {} --on
--a_c N --d N ...

noted: one
where: at --t 1
--a-b {1} --c

missing: a feature
lack: it is not there
way out: do without
decides: --ours
--a-b N --c

idle: nothing asks for it
where: without --e and --f
if: not --e and not --f
--a-g --a-* [...]
"""


def test_of_several_answers_the_first_that_fits_counts_and_patterns_come_last() -> None:
    read, note, missing, idle = blocks = list(blocks_of(TABLE))
    (feature,) = features_of(blocks)
    assert (feature.name, feature.reason) == ("a feature", "it is not there; do without")
    assert (feature.decides, feature.flags, feature.idle) == ("--ours", missing, (idle,))
    rows = [*read.rows("rewritten", "--ours {} --on"), *note.rows("noted", "one")]
    answers = Answers([*rows, *feature.noted, *feature.refused])

    def reason(option: str, values: list[str], given: dict[str, list[str]]) -> str | None:
        answer = answers.to(option, values, Line(given))
        return answer.reason if answer else None

    assert reason("--a-b", ["1"], {}) == "one"
    assert reason("--a-b", ["1"], {"--t": ["2"]}) == feature.reason
    assert reason("--a-b", ["2"], {}) == feature.reason
    assert reason("--a-b", [], {}) is None
    assert reason("--a-g", [], {}) == reason("--a-x", ["7", "8"], {}) == "nothing asks for it"
    assert reason("--a-g", [], {"--f": []}) == reason("--a-x", [], {"--f": []}) == feature.reason
    assert reason("--e", [], {}) is None
    (answer,) = answers.of("--a-c")
    assert answer.words(["5"], Line({})) == ["--ours", "5", "--on"]


def test_the_iterations_that_are_timed_are_as_many_as_without_an_end() -> None:
    """The table's condition has the number that --profile-schedule-end has if it is not given."""
    for answer, *_ in (ANSWERS.of(f"--{name}-start{end}") for name, end in TIMERS):
        assert f"+ {SCHEDULE_PROFILE_ITERATIONS}" in answer.condition


def test_conditions_on_a_line() -> None:
    words = {"--tensor-model-parallel-size": ["2"], "--pipeline-model-parallel-size": ["4"]}
    assert Line(words, 8).replicas == 1
    assert Line(words, 16).replicas == 2
    dry = words | {"--dry-run": []}
    assert [Line(dry, ranks).replicas for ranks in (1, 16)] == [1, 2]
    assert Line(dry | {"--dry-run-replicas": ["3"]}, 1).replicas == 3
    assert Line({}, 3).replicas == 3
    length = {"--train-samples": ["100"], "--global-batch-size": ["8"]}
    assert Line(length).last_iteration == 12
    assert Line(length | {"--exit-interval": ["5"]}).last_iteration == 5
    assert Line({"--train-iters": ["7"], "--exit-interval": ["9"]}).last_iteration == 7
    assert Line({"--train-iters": ["x"]}).last_iteration == 0
    growing = length | {"--rampup-batch-size": ["2", "2", "24"]}
    assert Line(growing).last_iteration == 17, "8 iterations have 28 samples, and 9 have 72"
    assert Line({"--train-iters": ["10"]} | growing | {"--train-samples": []}).samples == 44


@pytest.mark.parametrize(
    ("words", "world_size", "noted", "refused"),
    [
        ("--distribute-saved-activations", 1, 1, 0),
        ("--distribute-saved-activations --tensor-model-parallel-size 2", 2, 1, 0),
        (
            "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-activations",
            2,
            0,
            1,
        ),
        (
            "--distribute-saved-activations --model-parallel-size 2 --recompute-activations",
            2,
            1,
            1,
        ),
        ("--tp-comm-overlap --model-parallel-size 2 --sequence-parallel", 2, 1, 0),
        ("--use-torch-fsdp2", 1, 1, 0),
        ("--use-torch-fsdp2", 2, 0, 1),
        ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", 2, 1, 0),
        ("--zero-stage 1 --overlap-grad-reduce", 4, 1, 0),
        ("--transformer-impl inference_optimized", 1, 0, 1),
        ("--fp8 hybrid --fp8-interval 1", 1, 2, 0),
        ("--fp8-hybrid", 1, 1, 0),
        ("--fp8-format hybrid --fp8-recipe custom", 1, 0, 1),
        ("--fp8-multi-head-attention --fp8-dot-product-attention", 1, 2, 0),
        ("--fp8-dot-product-attention --fp8-e4m3", 1, 1, 1),
        ("--log-loss-scale-to-tensorboard", 1, 1, 0),
        ("--check-for-nan-in-loss-and-grad --fp16", 1, 1, 0),
        ("--accumulate-allreduce-grads-in-fp32", 1, 1, 0),
        ("--accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16", 1, 0, 1),
        ("--main-params-dtype fp32", 1, 1, 0),
        ("--load-iteration 5 --no-load-rng", 1, 2, 0),
        ("--load-iteration 5 --no-load-rng --load x", 1, 1, 1),
        ("--no-position-embedding --use-rotary-position-embeddings", 1, 2, 0),
        ("--no-position-embedding", 1, 1, 0),
        ("--no-position-embedding --position-embedding-type alibi", 1, 1, 0),
        ("--position-embedding-type learned_absolute --no-position-embedding", 1, 1, 1),
        ("--trust-remote-code", 1, 1, 0),
        ("--tiktoken-other v", 1, 0, 1),
        ("--moe-extended-tp", 1, 1, 0),
        ("--moe-extended-tp --num-experts 8", 1, 0, 1),
        ("--moe-grouped-gemm --num-experts 8", 1, 1, 0),
        ("--moe-layer-recompute --recompute-granularity full", 1, 1, 0),
        ("--moe-layer-recompute --recompute-modules mlp", 1, 0, 1),
        ("--norm-topk-prob --num-experts 8", 1, 1, 0),
        ("--norm-topk-prob --num-experts 8 --moe-router-pre-softmax", 1, 0, 1),
        ("--dist-ckpt-strictness log_all --load x", 1, 1, 0),
        ("--dist-ckpt-strictness raise_all --load x", 1, 0, 1),
        ("--zero-bubble-max-pending-backward auto --enable-zero-bubble", 1, 0, 0),
        ("--zero-bubble-max-pending-backward auto --zero-bubble-v-schedule", 1, 1, 0),
        ("--zero-bubble-adaptive-memory-limit-percentile 9", 1, 0, 0),
        ("--zero-bubble-adaptive-memory-limit-percentile 9 --zero-bubble-v-schedule", 1, 1, 0),
        ("--scaling-recipe mup --scaling-base-hidden-size 8", 1, 2, 0),
        ("--scaling-recipe none", 1, 1, 0),
        ("--scaling-recipe depth_mup --scaling-base-num-layers 2", 1, 0, 2),
        ("--optimizer dist_muon", 1, 1, 0),
        ("--optimizer dist_muon", 2, 1, 0),
        ("--muon-scalar-optimizer adam", 1, 1, 0),
        ("--muon-scalar-optimizer lion --muon-fp32-matmul-prec low", 1, 0, 2),
        ("--lr-wsd-decay-style 1-sqrt --muon-use-nesterov", 1, 2, 0),
    ],
)
def test_the_answer_depends_on_other_flags(
    words: str, world_size: int, noted: int, refused: int
) -> None:
    found = sort(words, world_size)
    assert (len(found.notes), len(found.mistakes)) == (noted, refused)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--position-embedding-type rotary", "--position-embedding-type rope"),
        ("--normalization rmsnorm", "--normalization RMSNorm"),
        ("--optimizer adamw", "--optimizer adam"),
        ("--tokenizer-type PretrainedFromHF", "--tokenizer-type HuggingFaceTokenizer"),
        ("--tokenizer-name-or-path folder", "--tokenizer-model folder"),
        ("--tiktoken-special-tokens a b", "--tokenizer-special-tokens a b"),
        ("--use-z-loss", "--z-loss-coeff 1e-4"),
        ("--layernorm_epsilon 1e-6", "--norm-epsilon 1e-6"),
        (
            "--num-key-value-heads 4 --num-attention-heads 8",
            "--group-query-attention --num-query-groups 4 --num-attention-heads 8",
        ),
        ("--num-key-value-heads 8 --num-attention-heads 8", "--num-attention-heads 8"),
        (
            "--step-batch-size-schedule 0:16 2.4B:320 --seq-length 2048",
            "--batch-size-steps 0:16 1171875:320 --seq-length 2048",
        ),
        (
            "--step-batch-size-schedule 0:1,1k:2 bad 3:4 --seq-length 64",
            "--batch-size-steps 0:1 15:2 bad 0:4 --seq-length 64",
        ),
        (
            "--train-tokens 640 --seq-length 64 --train-samples 99",
            "--train-samples 10 --seq-length 64",
        ),
        (
            "--train-tokens 640 --seq-length 64 --train-samples 9",
            "--seq-length 64 --train-samples 9",
        ),
        (
            "--lr-decay-tokens 6400 --seq-length 64 --train-samples 200",
            "--lr-decay-samples 100 --seq-length 64 --train-samples 200",
        ),
        (
            "--lr-warmup-tokens 6400 --seq-length 64 --train-iters 99 --global-batch-size 5",
            "--lr-warmup-iters 20 --seq-length 64 --train-iters 99 --global-batch-size 5",
        ),
        (
            "--lr-warmup-tokens 112 --seq-length 4 --train-iters 99 --global-batch-size 8 "
            "--rampup-batch-size 2 2 24",
            "--lr-warmup-iters 8 --seq-length 4 --train-iters 99 --global-batch-size 8 "
            "--rampup-batch-size 2 2 24",
        ),
        (
            "--lr-decay-tokens 128 --seq-length 4 --train-iters 99 --global-batch-size 8 "
            "--step-batch-size-schedule 0:2,96:8",
            "--lr-decay-iters 13 --seq-length 4 --train-iters 99 --global-batch-size 8 "
            "--batch-size-steps 0:2 24:8",
        ),
        (
            "--schedule-timer-start 5 --schedule-timer-end 8 --train-iters 9",
            "--profile-schedule-start 5 --replan --profile-schedule-end 8 --train-iters 9",
        ),
        ("--schedule-timer-start 5 --schedule-timer-end 8 --train-iters 7", "--train-iters 7"),
        ("--schedule-timer-start 1 --schedule-timer-end 1", ""),
        (
            "--zero-bubble-pipeline-timers-start-iter 5 --train-iters 8",
            "--profile-schedule-start 5 --replan --train-iters 8",
        ),
        (
            "--moe-layer-recompute --recompute-activations",
            "--recompute-modules core_attn moe --recompute-activations",
        ),
        (
            "--moe-layer-recompute --num-experts 8",
            "--recompute-granularity selective --recompute-modules moe --num-experts 8",
        ),
        (
            "--num-layers 8 --moe-layer-freq -1 --first-k-dense-replace 3",
            "--num-layers 8 --moe-layer-freq [0]*3+[1]*5",
        ),
        (
            "--num-layers 8 --moe-layer-freq 2 --first-k-dense-replace 3",
            "--num-layers 8 --moe-layer-freq [0,0,0,0,1,0,1,0]",
        ),
        (
            "--num-layers 8 --first-k-dense-replace -1",
            "--num-layers 8 --moe-layer-freq [0]*0+[1]*8",
        ),
        ("--moe-layer-freq -1", "--moe-layer-freq 1"),
        (
            "--n-shared-experts 2 --moe-ffn-hidden-size 96 --ffn-hidden-size 64",
            "--moe-shared-expert-intermediate-size 192 --moe-ffn-hidden-size 96 "
            "--ffn-hidden-size 64",
        ),
        (
            "--n-shared-experts 2 --ffn-hidden-size 64",
            "--moe-shared-expert-intermediate-size 128 --ffn-hidden-size 64",
        ),
        (
            "--n-shared-experts 1 --moe-intermediate-size 96",
            "--moe-shared-expert-intermediate-size 96 --moe-ffn-hidden-size 96",
        ),
        ("--router-gating-in-fp32", "--moe-router-dtype fp32"),
        (
            "--allow-padding-num-layers --num-layers 7 --pipeline-model-parallel-size 2",
            "--layer-distribution remainder --num-layers 7 --pipeline-model-parallel-size 2",
        ),
        (
            "--allow-padding-num-layers --num-layers 8 --pipeline-model-parallel-size 2",
            "--num-layers 8 --pipeline-model-parallel-size 2",
        ),
    ],
)
def test_other_names_are_read_as_ours(words: str, ours: str) -> None:
    found = sort(words)
    assert not found.mistakes
    assert " ".join(found.words) == ours
    assert found.notes


def test_two_names_that_contradict_each_other_are_refused() -> None:
    (mistake,) = sort("--rope-theta 5 --rotary-base 6").mistakes
    assert mistake.startswith("--rotary-base 6 contradicts --rope-theta 5")


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        ("--log-throughput 5", "--log-throughput takes no value, got '5'"),
        (
            "--valid-num-workers",
            "--valid-num-workers: write --valid-num-workers N, or leave it out",
        ),
        (
            "--ds-sequence-parallel-size x y",
            "--ds-sequence-parallel-size x y: write --ds-sequence-parallel-size {1} or",
        ),
        ("--sequence-paralel", "--sequence-paralel is no flag: did you mean --sequence-parallel?"),
        (
            "--recompute-activation",
            "--recompute-activation is no flag: did you mean --recompute-activations?",
        ),
    ],
)
def test_what_is_written_wrongly_is_told_with_its_form(words: str, begin: str) -> None:
    (mistake,) = sort(words).mistakes
    assert mistake.startswith(begin)

"""Command lines that make no run: the error names the flag, its value and a way out."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_lines import with_flags

from megatron.data.indexed import IndexedWriter
from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.model.maximal_update import in_usual_terms
from megatron.model.settings import ShapeSettings
from megatron.optimizer.lr_schedule import rates
from megatron.planning.run_plan import make_run_plan
from megatron.run import cluster
from megatron.run.command_line import parse
from megatron.run.rules import devices

VOCAB = 1000


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "corpus", VOCAB) as writer:
        writer.add_document(list(range(100)))
    return tmp_path / "corpus"


@pytest.fixture
def base(prefix: Path) -> dict[str, str]:
    """A command line that makes a run, by flag."""
    return {
        "--num-layers": "4",
        "--hidden-size": "64",
        "--num-attention-heads": "8",
        "--seq-length": "32",
        "--micro-batch-size": "2",
        "--train-iters": "10",
        "--lr": "1e-3",
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": "999",
        "--device": "cpu",
        "--data-path": str(prefix),
    }


def command_line(base: dict[str, str], flags: str, without: tuple[str, ...] = ()) -> list[str]:
    usual = [f"{flag} {value}" for flag, value in base.items() if flag not in without]
    return with_flags(" ".join(usual).split(), flags.split())


def refusal(
    base: dict[str, str], flags: str = "", world_size: int = 1, without: tuple[str, ...] = ()
) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make_run_plan(parse(command_line(base, flags, without), world_size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--num-layers 5 --pipeline-model-parallel-size 2", 2, "--num-layers 5 4 or 6"),
        ("--num-layers 1 --pipeline-model-parallel-size 2", 2, "--num-layers 1 use 2"),
        ("--num-attention-heads 7", 1, "--num-attention-heads 7 64 --kv-channels"),
        ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups 3 8"),
        ("--swiglu --hidden-size 16", 1, "--hidden-size 16 --ffn-hidden-size"),
        ("--max-position-embeddings 31", 1, "--seq-length 32 --max-position-embeddings 31 raise"),
        (
            "--position-embedding-type rope --rotary-percent 0.4",
            1,
            "--rotary-percent 0.4 3 of the 8",
        ),
        (
            "--position-embedding-type rope --rotary-percent 1.5",
            1,
            "--rotary-percent 1.5 at most 1",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 0.5",
            1,
            "--rope-scaling-factor 0.5 at least 1",
        ),
        ("--squared-relu --swiglu", 1, "--squared-relu --swiglu give one"),
        ("--mock-data --data-path some", 1, "--mock-data --data-path some: give one"),
        ("--attention-dropout 1", 1, "--attention-dropout 1.0 at most 0.999999"),
        ("--hidden-dropout -0.1", 1, "--hidden-dropout -0.1 at least 0"),
        ("--label-smoothing 1", 1, "--label-smoothing 1.0 at most 0.999999"),
        ("--z-loss-coeff nan", 1, "--z-loss-coeff nan at most 1,000"),
        ("--logit-softcap -1", 1, "--logit-softcap -1.0 at least 0"),
        ("--num-layers 0", 1, "--num-layers 0 at least 1"),
        ("--pipeline-model-parallel-size 4", 2, "--pipeline-model-parallel-size 4 2 rank start 4"),
        ("--pipeline-model-parallel-size 2", 5, "--pipeline-model-parallel-size 2 5 start 4 6"),
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 6",
            8,
            "--global-batch-size 6 of 2 for 4 replicas use 8 another multiple of 8",
        ),
        (
            "--tensor-model-parallel-size 2",
            1,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 1 rank start 2 lower",
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            6,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 4 ranks 6 start 4 8",
        ),
        (
            "--tensor-model-parallel-size 3 --dry-run",
            1,
            "--tensor-model-parallel-size 3 --num-attention-heads multiple of 3 fewer",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 7",
            2,
            "--tensor-model-parallel-size 2 --seq-length 7 multiple of 2",
        ),
        (
            "--enable-vocab-parallel --vocab-parallel vocab-1",
            1,
            "--enable-vocab-parallel vocab-2 vocab-1 give one",
        ),
        (
            "--enable-vocab-parallel --disable-backward-fusion --vocab-parallel vocab-2",
            1,
            "--enable-vocab-parallel vocab-1 vocab-2 give one",
        ),
        ("--micro-batch-size 0", 1, "--micro-batch-size 0 at least 1"),
        ("--global-batch-size 5", 1, "--global-batch-size 5 --micro-batch-size 2 4 or 6"),
        ("--train-samples 100", 1, "--train-iters --train-samples both give one"),
        ("--eval-interval 0", 1, "--eval-interval 0 at least 1"),
        ("--lr -1", 1, "--lr -1.0 at least 1e-12"),
        ("--lr nan", 1, "--lr nan at least 1e-12"),
        ("--min-lr 1", 1, "--min-lr 1.0 --lr 0.001 lower"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, "--lr-warmup-iters 1 0.1 give one"),
        ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 20 samples shorten"),
        ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction 1.0 at most 0.999999"),
        ("--lr-warmup-samples 3", 1, "--lr-warmup-samples 3 --train-iters --lr-warmup-iters"),
        ("--lr-decay-samples 30", 1, "--lr-decay-samples 30 --lr-decay-iters"),
        ("--adam-beta2 1", 1, "--adam-beta2 1.0 at most 0.999999"),
        ("--weight-decay inf", 1, "--weight-decay inf at most 1,000"),
        ("--lr-decay-style WSD", 1, "--lr-decay-style WSD give --lr-wsd-decay-iters"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 3",
            1,
            "--lr-wsd-decay-samples 3 --train-iters --lr-wsd-decay-iters",
        ),
        (
            "--decoupled-lr 1e-4 --decoupled-min-lr 2e-4",
            1,
            "--decoupled-min-lr 0.0002 --decoupled-lr 0.0001 lower",
        ),
        (
            "--decoupled-lr 1e-4 --min-lr 2e-4",
            1,
            "--decoupled-lr 0.0001 --min-lr 0.0002 --decoupled-min-lr",
        ),
        ("--start-weight-decay 0.2", 1, "--start-weight-decay 0.2 constant linear cosine"),
        (
            "--weight-decay-incr-style linear --end-weight-decay 1",
            1,
            "--weight-decay-incr-style linear first step give --start-weight-decay",
        ),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay 0.5",
            1,
            "--end-weight-decay 0.5 --start-weight-decay 1.0 raise",
        ),
        (
            "--optimizer muon --muon-num-ns-steps 7",
            1,
            "--muon-num-ns-steps 7 quintic multiple of 5",
        ),
        (
            "--optimizer muon --muon-coefficient-type polar_express",
            1,
            "--muon-num-ns-steps 5 polar_express 8 steps or more",
        ),
        (
            "--use-mup --mup-base-hidden-size 16 --mup-width-mult 3",
            1,
            "--mup-width-mult 3 64 / --mup-base-hidden-size 16 = 4 leave",
        ),
        (
            "--use-mup --multi-latent-attention --position-embedding-type rope",
            1,
            "--use-mup --multi-latent-attention leave one",
        ),
        ("--use-mup --mup-embedding-mult 2", 1, "--mup-embedding-mult 2 learned leave rope"),
        ("--peak-tflops 0", 1, "--peak-tflops 0.0 at least 1e-06"),
        ("--profile --profile-step-end 10", 1, "--profile-step-end 10 --profile-step-start 10"),
        ("--profile --exit-interval 5", 1, "--profile-step-start 10 last iteration, 5 lower"),
        ("--profile-schedule-start 0", 1, "--profile-schedule-start 0 at least 1"),
        (
            "--profile-schedule-start 2",
            1,
            "--profile-schedule-start 2 --save-measured-costs --replan",
        ),
        (
            "--save-measured-costs c.json",
            1,
            "--save-measured-costs c.json --profile-schedule-start",
        ),
        ("--replan", 1, "--replan measured --profile-schedule-start"),
        (
            "--replan --profile-schedule-start 4 --profile-schedule-end 4",
            1,
            "--profile-schedule-end 4 --profile-schedule-start 4 raise",
        ),
        ("--replan --profile-schedule-start 8", 1, "start 8 11 --replan one more last is 10 lower"),
        (
            "--save-measured-costs c.json --profile-schedule-start 9 --profile-schedule-end 12",
            1,
            "--profile-schedule-start 9 12 last is 10 lower",
        ),
        (
            "--replan --profile-schedule-start 2 --schedule-file p.txt",
            1,
            "--replan --schedule-file p.txt leave",
        ),
        ("--dry-run-gpu H100", 1, "--dry-run-gpu H100 --dry-run"),
        ("--split 0,1", 1, "--split 0,1 969,30,1"),
        ("--split a,b,c", 1, "--split a,b,c 969,30,1"),
        ("--split 1,2,3,4", 1, "--split 1,2,3,4 969,30,1"),
        (
            "--tokenizer-type GPT2BPETokenizer",
            1,
            "--vocab-file GPT2BPETokenizer vocab.json",
        ),
        (
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model nowhere.model",
            1,
            "--tokenizer-model nowhere.model give",
        ),
        ("--tokenizer-type NoSuchTokenizer", 1, "--tokenizer-type NoSuchTokenizer choose"),
        ("--fp16 --bf16", 1, "--fp16 --bf16"),
        (
            "--fp16 --min-loss-scale 8 --initial-loss-scale 4",
            1,
            "--min-loss-scale 8 above --initial-loss-scale 4 lower",
        ),
        (
            "--bf16 --exp-avg-dtype bf16",
            1,
            "--exp-avg-dtype bf16 --use-precision-aware-optimizer add",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --optimizer sgd",
            1,
            "--exp-avg-sq-dtype bf16 --optimizer sgd fp32",
        ),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16",
            1,
            "--main-grads-dtype bf16: add --bf16 or --fp16",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8",
            1,
            "--exp-avg-dtype fp8: a scale use bf16",
        ),
        ("--main-params-dtype fp16", 1, "--main-params-dtype fp16: always fp32"),
        (
            "--load x --use-checkpoint-opt_param-scheduler",
            1,
            "--use-checkpoint-opt-param-scheduler: flags give",
        ),
        ("--pretrained-checkpoint out", 1, "--pretrained-checkpoint out: --load leave"),
        (
            "--recompute_granularity full",
            1,
            "--recompute-granularity full --recompute-method block",
        ),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block",
            1,
            "--recompute-activations --recompute-granularity full leave",
        ),
        (
            "--recompute-granularity selective --recompute-method uniform",
            1,
            "--recompute-method uniform --recompute-granularity selective leave",
        ),
        (
            "--recompute-activations --recompute-modules core_attn shared_experts",
            1,
            "--recompute-modules shared_experts: moe core_attn",
        ),
        (
            "--recompute-activations --recompute-modules softmax",
            1,
            "--recompute-modules softmax: name core_attn",
        ),
        ("--recompute-in-bubble", 1, "--recompute-in-bubble: --recompute-modules leave"),
        (
            "--checkpoint-activations --checkpoint-in-cpu",
            1,
            "--checkpoint-in-cpu: whole leave",
        ),
        (
            "--recompute-activations --distribute-saved-activations --tensor-model-parallel-size 2",
            2,
            "--distribute-saved-activations: whole leave --sequence-parallel",
        ),
        ("--use-torch-fsdp2", 2, "--use-torch-fsdp2: replicas use --use-distributed-optimizer"),
        ("--overlap-param-gather", 2, "--overlap-param-gather: add --use-distributed-optimizer"),
        (
            "--use-distributed-optimizer --overlap-param-gather --enable-optimizer-post-validation",
            4,
            "--overlap-param-gather --enable-optimizer-post-validation leave",
        ),
        (
            "--context-parallel-size 2",
            1,
            "--context-parallel-size 2 with 2 ranks of a replica start",
        ),
        ("--context-parallel-size=3", 3, "--context-parallel-size 3 --seq-length multiple of 6"),
        (
            "--cp-comm-type p2p --context-parallel-size 2",
            2,
            "--attention-dropout 0.1 --cp-comm-type p2p 0 --cp-comm-type all_gather",
        ),
        (
            "--cp-comm-type a2a --context-parallel-size 2 --group-query-attention "
            "--num-query-groups 1",
            2,
            "--cp-comm-type a2a --context-parallel-size 2 1 heads fewer ranks",
        ),
        (
            "--cp-comm-type a2a+p2p --context-parallel-size 4 --attention-dropout 0",
            4,
            "--hierarchical-context-parallel-sizes unset --context-parallel-size 4 two numbers a2a",
        ),
        (
            "--cp-comm-type a2a+p2p --context-parallel-size 4 "
            "--hierarchical-context-parallel-sizes 2 2 --group-query-attention "
            "--num-query-groups 1",
            4,
            "--attention-dropout 0.1 --cp-comm-type a2a+p2p a2a+p2p x 2 ranks 1 heads fewer",
        ),
        ("--valid-num-workers", 1, "--valid-num-workers: write --valid-num-workers N or leave"),
        ("--attention-backend slow", 1, "--attention-backend slow: auto,flash leave"),
        ("--log-throughput=5", 1, "--log-throughput no value 5"),
    ],
)
def test_refused_with_flag_value_and_way_out(
    base: dict[str, str], flags: str, world_size: int, words: str
) -> None:
    message = refusal(base, flags, world_size)
    position = 0
    for word in words.split():
        found = message.find(word, position)
        assert found >= 0, f"no {word!r} in its place in: {message}"
        position = found + len(word)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-query-groups 3", "--num-query-groups 3 --group-query-attention"),
        ("--rotary-base 500", "--rotary-base 500 --position-embedding-type rope"),
        ("--disable-backward-fusion", "--disable-backward-fusion --enable-vocab-parallel"),
        ("--distributed-backend nccl", "--distributed-backend nccl gloo"),
        ("--eval-iters 5 --split 1,0,0", "--eval-iters 5 --split 1,0,0 969,30,1"),
        ("--eval-interval 2 --split 1,0,0", "--eval-interval 2 --split 1,0,0 969,30,1"),
        ("--min-lr 1e-4 --lr-decay-style constant", "--min-lr 0.0001 constant"),
        ("--lr-decay-iters 9 --lr-decay-style constant", "--lr-decay-iters 9 constant"),
        ("--lr-warmup-init 1e-5", "--lr-warmup-init 1e-05 --lr-warmup-iters"),
        ("--lr-wsd-decay-iters 3", "--lr-wsd-decay-iters 3 --lr-decay-style WSD"),
        ("--decoupled-min-lr 1e-5", "--decoupled-min-lr 1e-05 --decoupled-lr"),
        ("--start-weight-decay 0.01", "--start-weight-decay 0.01 constant --weight-decay"),
        ("--sgd-momentum 0.5", "--sgd-momentum 0.5 --optimizer sgd"),
        ("--muon-nesterov", "--muon-nesterov --optimizer muon"),
        ("--muon-tp-mode distributed", "--muon-tp-mode distributed --optimizer muon"),
        ("--mup-base-hidden-size 32", "--mup-base-hidden-size 32 --use-mup"),
        ("--output-layer-init-method-std 0.1", "-init-method-std 0.1 --untie-embeddings"),
        ("--profile-step-end 20", "--profile-step-end 20 --profile"),
        ("--profile-schedule-end 2", "--profile-schedule-end 2 --profile-schedule-start"),
        ("--tokenizer-model some.model", "--tokenizer-model some.model NullTokenizer"),
        ("--final-stage-num-layers 2", "--final-stage-num-layers 2 --enable-layer-redistribution"),
        ("--zero-bubble-v-schedule-mem-setup min", "mem-setup min --zero-bubble-v-schedule"),
        ("--num-virtual-stages-per-pipeline-rank 1", "-rank 1 one stage"),
        ("--num-layers-per-virtual-pipeline-stage 4", "-stage 4 one stage"),
        ("--save-interval 5", "--save-interval 5 --save"),
        ("--overlap-grad-reduce", "--overlap-grad-reduce one replica"),
        ("--sequence-parallel", "--sequence-parallel --tensor-model-parallel-size 1"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer one replica"),
        ("--initial-loss-scale 65536", "--initial-loss-scale 65536 --fp16"),
        ("--loss-scale 8", "--loss-scale 8.0 --fp16"),
        ("--fp32-residual-connection", "--fp32-residual-connection --bf16 --fp16"),
        ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer fp32"),
        ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy fp32 anyway"),
        ("--no-query-key-layer-scaling", "--no-query-key-layer-scaling cancels"),
        ("--allow-padding-num-layers", "--allow-padding-num-layers evenly"),
        ("--zero-bubble-pipeline-timers-start-iter 100", "timers-start-iter 100 no iteration"),
        ("--zero-bubble-pipeline-timers-start-iter 8", "timers-start-iter 8 no iteration"),
    ],
)
def test_what_changes_nothing_is_told_and_trains_the_same(
    base: dict[str, str], flags: str, words: str
) -> None:
    config, plain = (parse(command_line(base, given), 1) for given in (flags, ""))
    (note,) = config.notes
    assert note.startswith(flags.split()[0])
    position = 0
    for word in words.split():
        found = note.find(word, position)
        assert found >= 0, f"no {word!r} in its place in: {note}"
        position = found + len(word)
    assert config.parallel == plain.parallel
    assert config.train.wide_stream == plain.train.wide_stream
    same = replace(config.train, eval_iters=100, precision=plain.train.precision)
    assert same == plain.train
    samples = range(0, 30, 3)
    constant = replace(plain.optimizer, lr_decay_style=config.optimizer.lr_decay_style)
    assert [rates(config.optimizer, n) for n in samples] == [rates(constant, n) for n in samples]
    assert config.model.replaced(rotary_base=10000) == plain.model


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--rampup-batch-size 2 2", 1, "--rampup-batch-size 2 2 three whole numbers"),
        ("--rampup-batch-size 2 2 x", 1, "--rampup-batch-size 2 2 x three whole numbers"),
        ("--rampup-batch-size 2 0 9", 1, "--rampup-batch-size 2 0 9 at least 1"),
        ("--rampup-batch-size 2 4 9", 1, "--rampup-batch-size 2 4 9 --global-batch-size 8"),
        ("--rampup-batch-size 8 2 9", 1, "--rampup-batch-size 8 2 9 --global-batch-size 8"),
        ("--rampup-batch-size 2 3 9", 1, "--rampup-batch-size 2 3 9 microbatches of 2 multiples"),
        ("--rampup-batch-size 2 2 9", 2, "--rampup-batch-size 2 2 9 2 replicas multiples of 4"),
        ("--batch-size-steps 0:2 4", 1, "--batch-size-steps 0:2 4 pairs SAMPLES:SIZE"),
        ("--batch-size-steps 0:2 4:x", 1, "--batch-size-steps 0:2 4:x pairs SAMPLES:SIZE"),
        ("--batch-size-steps 0:2:4", 1, "--batch-size-steps 0:2:4 pairs SAMPLES:SIZE"),
        ("--batch-size-steps ,", 1, "--batch-size-steps , begins at 0 samples"),
        ("--batch-size-steps 4:2 9:8", 1, "--batch-size-steps 4:2 9:8 begins at 0 samples"),
        ("--batch-size-steps 0:4 9:2", 1, "--batch-size-steps 0:4 9:2 both numbers rise"),
        ("--batch-size-steps 0:0 9:8", 1, "--batch-size-steps 0:0 9:8 begins at 0 samples"),
        ("--batch-size-steps 0:2 9:4", 1, "--batch-size-steps 0:2 9:4 --global-batch-size 8"),
        ("--batch-size-steps 0:3 9:8", 1, "--batch-size-steps 0:3 9:8 microbatches of 2 multiples"),
        ("--batch-size-steps 0:2 9:8", 2, "--batch-size-steps 0:2 9:8 2 replicas multiples of 4"),
        (
            "--rampup-batch-size 2 2 9 --pipeline-schedule auto",
            1,
            "--rampup-batch-size 2 2 9 --pipeline-schedule auto give one",
        ),
    ],
)
def test_batches_that_cannot_grow_so_are_refused(
    base: dict[str, str], flags: str, world_size: int, words: str
) -> None:
    sized = f"{flags} --train-samples 40 --global-batch-size 8"
    message = refusal(base, sized, world_size, without=("--train-iters",))
    assert len(message.splitlines()) == 1
    position = 0
    for word in words.split():
        found = message.find(word, position)
        assert found >= 0, f"no {word!r} in its place in: {message}"
        position = found + len(word)


def test_mup_scales_with_the_width(base: dict[str, str]) -> None:
    flags = "--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --init-method-std 0.04"
    run = parse(command_line(base, flags), 1)
    assert run.notes == ()
    model = in_usual_terms(run.model)
    assert (model.init_method_std, model.embedding_init_method_std) == (0.02, 0.04)
    assert model.attention.softmax_scale == 2 / 8
    assert (model.vocabulary.logit_multiplier, run.optimizer.width_mult) == (1 / 4, 4.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use-mup", "--use-mup 64, as --hidden-size"),
        ("--use-mup --mup-base-hidden-size 64", "--use-mup 64, as --hidden-size"),
        ("--use-mup --mup-base-hidden-size 16 --mup-width-mult 4", "--mup-width-mult 4 follows"),
        ("--use-mup --mup-base-hidden-size 16 --optimizer muon", "--use-mup muon unit_rms_norm"),
        (
            "--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --softmax-scale 1",
            "--mup-base-head-dim 4 --softmax-scale",
        ),
    ],
)
def test_mup_says_what_it_leaves_alone(base: dict[str, str], flags: str, words: str) -> None:
    (note,) = parse(command_line(base, flags), 1).notes
    position = 0
    for word in words.split():
        found = note.find(word, position)
        assert found >= 0, f"no {word!r} in its place in: {note}"
        position = found + len(word)


@pytest.mark.parametrize("mode", ["distributed", "blockwise"])
def test_muon_has_slices_only_where_ranks_share_a_matrix(base: dict[str, str], mode: str) -> None:
    flags = f"--optimizer muon --muon-tp-mode {mode}"
    shared = parse(command_line(base, f"{flags} --tensor-model-parallel-size 2"), 2)
    assert (shared.notes, shared.optimizer.muon.muon_tp_mode) == ((), mode)
    (note,) = parse(command_line(base, flags), 1).notes
    assert note.startswith(f"--muon-tp-mode {mode} changes nothing")
    assert "--tensor-model-parallel-size 1" in note


def test_a_dry_run_says_what_it_does_not_predict(base: dict[str, str]) -> None:
    muon, precise = "--optimizer muon --bf16 --dry-run", "--muon-fp32-matmul-prec highest"
    line = command_line(base, f"{muon} {precise}", without=("--data-path",))
    (note,) = parse(line, 1).notes
    assert note.startswith(precise)
    assert "dry run" in note
    assert parse(command_line(base, muon, without=("--data-path",)), 1).notes == ()


def test_a_dry_run_names_the_files_that_it_does_not_read(base: dict[str, str]) -> None:
    """None of them has to be here, and nobody is to believe that they were looked at."""
    unread = "--load gone --deepspeed-config gone.json --data-args-path gone.txt --save here"
    line = command_line(base, f"{unread} --bf16 --dry-run", without=("--data-path",))
    (note,) = parse(line, 1).notes
    named, _, words = note.partition(": ")
    assert named == "--data-args-path gone.txt, --load gone, --deepspeed-config gone.json"
    assert words.startswith("not read in a dry run")


def test_a_trigger_path_is_a_folder(base: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert f"--trigger-path {tmp_path / 'pipe'} is no folder" in refusal(
        base, f"--trigger-path {tmp_path / 'pipe'}"
    )
    for folder in (tmp_path, tmp_path / "made later"):
        parse([*command_line(base, ""), "--trigger-path", str(folder)], 1)


def test_what_must_be_given_is_asked_for(base: dict[str, str]) -> None:
    assert "--lr is missing" in refusal(base, without=("--lr",))
    assert "neither" in refusal(base, without=("--train-iters",))
    assert "tools/sample_data.py" in refusal(base, without=("--data-path",))
    assert "NullTokenizer" in refusal(base, without=("--tokenizer-type",))
    assert "--vocab-size" in refusal(base, without=("--vocab-size",))
    mock = refusal(base, "--mock-data", without=("--data-path", "--tokenizer-type", "--vocab-size"))
    assert mock.startswith("--tokenizer-type is missing")
    assert "with --mock-data or --dry-run, --vocab-size N is enough" in mock


def test_traced_ranks_are_ranks_of_the_job(base: dict[str, str]) -> None:
    flags = "--profile --pipeline-model-parallel-size 2 --profile-ranks"
    assert parse(command_line(base, f"{flags} 1 7"), 2).log.profile_ranks == (1, 7)
    assert refusal(base, f"{flags} 3 2", 2).startswith("--profile-ranks 3 2: nothing would be tra")
    (note,) = parse(command_line(base, "--profile-ranks 0"), 1).notes
    assert note == "--profile-ranks 0 changes nothing without --profile"


def test_a_rule_that_asks_for_what_is_no_flag_fails(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a rule would be silent for ever if that passed for a flag with a faulty value."""

    def rule(flags: Flags) -> Iterator[str]:
        yield str(getattr(flags[ShapeSettings], "number_of_layers"))  # noqa: B009 (mypy knows that it is missing)

    monkeypatch.setattr("megatron.run.command_line.rules_for", lambda run: (refuses(rule),))
    with pytest.raises(AttributeError, match="number_of_layers"):
        parse(command_line(base, "--num-layers 0"), 1)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-query-groups 0 --tensor-model-parallel-size 2",
        "--num-query-groups x --tensor-model-parallel-size 2",
        "--num-query-groups 0 --fp8-format e4m3",
        "--embedding-multiplier 0 --scale-embeddings-by-hidden-size --num-seq-splits 2",
    ],
)
def test_a_faulty_value_from_which_a_model_is_made_is_told_once(
    base: dict[str, str], flags: str
) -> None:
    given = " ".join(flags.split()[:2])
    lines = refusal(base, flags, 2).splitlines()
    assert [line.startswith(given) and ": must be" in line for line in lines].count(True) == 1


def test_a_window_of_no_earlier_token_is_a_window(base: dict[str, str]) -> None:
    words = "--window-size 0,0 --window-attn-skip-freq 2 --position-embedding-type rope"
    found = parse(command_line(base, f"{words} --rotary-base-local 100"), 1)
    assert [found.model.window_of(layer) for layer in range(4)] == [0, None, 0, None]
    assert not any("window" in note for note in found.notes)


def test_spans_in_iterations_do_not_go_with_samples(base: dict[str, str]) -> None:
    message = refusal(base, "--train-samples 100 --lr-decay-iters 5", without=("--train-iters",))
    assert "--lr-decay-iters 5" in message
    assert "--lr-decay-samples" in message


def test_a_warm_up_in_the_wrong_unit_is_told_once(base: dict[str, str]) -> None:
    message = refusal(base, "--lr-warmup-samples 5 --train-iters 2")
    assert message.startswith("--lr-warmup-samples 5 does not go with --train-iters")
    assert "\n" not in message


def test_samples_for_less_than_an_iteration(base: dict[str, str]) -> None:
    message = refusal(base, "--train-samples 3 --global-batch-size 4", without=("--train-iters",))
    assert "--train-samples 3" in message


def test_cuda_asked_for_where_there_is_none(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(base, "--device cuda")
    assert "--device cuda" in message
    assert "--device cpu" in message


def test_gloo_is_refused_on_cuda(base: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "nccl" in refusal(base, "--device cuda --distributed-backend gloo")


def test_cuda_is_taken_where_there_is_one(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    parallel = parse(command_line(base, "--device auto"), 1).parallel
    assert (parallel.devices.device, parallel.devices.distributed_backend) == ("cuda", "nccl")
    assert parallel.gpu is not None
    assert parallel.gpu.name == "H100"


def test_a_missing_corpus_names_the_file(base: dict[str, str], tmp_path: Path) -> None:
    message = refusal(base, f"--data-path {tmp_path}/nothing")
    assert f"{tmp_path}/nothing.idx" in message


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_index_names_the_file(base: dict[str, str], prefix: Path, damage: str) -> None:
    index = Path(f"{prefix}.idx")
    content = index.read_bytes()
    index.write_bytes(content[:-5] if damage == "truncated" else b"PK" + content)
    assert str(index) in refusal(base)


@pytest.mark.parametrize("blend", ["0.3 a 0.7", "a b", "-1 a", "nan a 1 b", "0 a"])
def test_a_data_path_that_is_no_blend(base: dict[str, str], blend: str) -> None:
    message = refusal(base, f"--data-path {blend}")
    assert "--data-path" in message
    assert "WEIGHT PREFIX" in message or "weight before every prefix" in message


@pytest.mark.parametrize(
    "flags",
    [
        "--no-such-flag",
        "--num-layers four",
        "--num-layers",
        "--num-layers 4 5",
        "--seed 1.5",
        "--lr fast",
        "--lr-decay-style square",
        "--swiglu true",
        "--use-rotary-position-embeddings true",
        "--profile-dir -x",
        "--tokenizer-type -x",
        "--split -1",
        "--data-path 0.5 -x",
        "--data-path",
        "--lr -inf",
    ],
)
def test_a_syntax_error_names_the_flag(base: dict[str, str], flags: str) -> None:
    assert refusal(base, flags).startswith(flags.split()[0])


def test_a_word_that_begins_with_a_dash_hides_no_other_mistake(base: dict[str, str]) -> None:
    lines = refusal(base, "--profile-dir -x --data-path --lr 0").splitlines()
    assert [line.split(":")[0] for line in lines] == ["--profile-dir -x", "--data-path", "--lr 0.0"]
    assert "./-x" in lines[0]
    assert "[WEIGHT] PREFIX" in lines[1]


def test_a_word_before_any_flag_is_refused(base: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'astray' stands before any flag"):
        parse(["astray", *command_line(base, "")], 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ("fpu avx512f avx512_bf16", ["bf16"]),
        ("fpu amx_bf16 amx_tile", ["bf16"]),
        ("fpu avx512_bf16 avx512_fp16", ["bf16", "fp16"]),
        ("Features : fp asimd bf16", ["bf16"]),
        ("Features : fp asimd asimdhp", ["fp16"]),
        ("fpu avx2 avx512f", []),
        (None, ["bf16", "fp16"]),
    ],
)
def test_a_precision_without_instructions_for_it_is_noted(
    base: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str | None,
    fast: list[str],
    precision: str,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(devices, "CPUINFO", cpuinfo)
    option = f"--{precision}"
    notes = parse(command_line(base, option), 1).notes
    assert [note.split()[0] for note in notes] == ([] if precision in fast else [option])
    assert parse(command_line(base, ""), 1).notes == ()
    (of_data,) = parse(command_line(base, f"{option} --dry-run"), 1).notes
    assert of_data.startswith("--data-path")


def test_nccl_on_cpus_is_noted_with_the_reason_why_gpus_are_out_of_reach(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cluster, "why_gpus_are_out_of_reach", lambda: "an old driver")
    (note,) = parse(command_line(base, "--distributed-backend nccl --device auto"), 1).notes
    assert note.startswith("--distributed-backend nccl changes nothing: an old driver; ranks on")
    (note,) = parse(command_line(base, "--distributed-backend nccl"), 1).notes
    assert "driver" not in note  # CPUs were asked for


@pytest.mark.parametrize("rank", [0, 1])
def test_help_is_printed_once_and_is_no_fault(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], world_size=2, speak=rank == 0)
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert ("--pipeline-model-parallel-size" in printed) == (rank == 0)


def test_every_rank_needs_a_gpu_of_its_own(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = refusal(base, "--device cuda")
    assert "--nproc-per-node 2" in message
    assert "1 CUDA" in message


def test_a_run_without_training_needs_no_length_and_no_learning_rate(
    base: dict[str, str], tmp_path: Path
) -> None:
    """As running.md writes it: --skip-train --load checkpoints --eval-iters 10."""
    without = ("--train-iters", "--lr")
    flags = f"--skip-train --load {tmp_path} --eval-iters 10 --split 8,1,1"
    config = parse(command_line(base, flags, without), 1)
    assert config.train.final_sets == ("validation", "test")
    assert config.train.eval_iters == 10
    assert not config.notes
    for spans in ("--lr-warmup-iters 10", "--lr-warmup-samples 100", "--lr-decay-style WSD"):
        parse(command_line(base, f"{flags} {spans}", without), 1)
    with pytest.raises(ValueError, match=r"(?s)--lr is missing.*--train-iters or --train-samples"):
        parse(command_line(base, "", without), 1)


@pytest.mark.parametrize(
    ("flags", "evaluates"),
    [("", False), ("--eval-iters 0", False), ("--eval-iters 5", True), ("--eval-iters 100", True)],
)
def test_batches_alone_ask_for_one_evaluation_at_the_end(
    base: dict[str, str], flags: str, evaluates: bool
) -> None:
    """Megatron-LM evaluates at the end of a run whenever --eval-iters is not 0."""
    config = parse(command_line(base, f"{flags} --split 8,1,1"), 1)
    assert config.train.final_sets == (("validation", "test") if evaluates else ())
    assert config.train.eval_interval is None


def test_gradients_that_travel_in_bf16_add_up_in_fp32_and_a_note_says_so(
    base: dict[str, str],
) -> None:
    narrow = "--use-precision-aware-optimizer --main-grads-dtype bf16"
    flags = "--grad-reduce-in-bf16 --bf16 --global-batch-size 4"
    [note] = parse(command_line(base, flags), 2).notes
    assert note.startswith("--grad-reduce-in-bf16 rounds the gradients that travel")
    assert f"Megatron-LM adds up in bf16 too, as {narrow} does here" in note
    assert parse(command_line(base, f"{flags} {narrow}"), 2).train.gradient_dtype == torch.bfloat16
    assert not parse(command_line(base, f"{flags} {narrow}"), 2).notes

"""From a command line to a configuration: what each flag becomes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import with_flags

from megatron.data.indexed import IndexedWriter
from megatron.data.shares import Split
from megatron.flags.tree import values_of
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.settings import ModelSettings
from megatron.parallel.settings import DeviceSettings
from megatron.run.command_line import parse, read
from megatron.run.run_config import RunConfig

VOCAB = 1000  # with the end-of-document token that NullTokenizer adds to 999

MOCK = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --device cpu --mock-data --vocab-size 99"
)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "corpus", VOCAB) as writer:
        for document in range(20):
            writer.add_document([document, document + 1, VOCAB - 1])
    return tmp_path / "corpus"


@pytest.fixture
def run(prefix: Path) -> Callable[..., Any]:
    """Parses the smallest command line that makes a run, and the flags under test."""

    def parse_with(flags: str = "", world_size: int = 1, data_path: str = str(prefix)) -> RunConfig:
        base = (
            "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
            "--micro-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 999 "
            f"--device cpu --data-path {data_path}"
        )
        length = "" if "--train-samples" in flags else "--train-iters 10"
        return parse(with_flags(f"{base} {length}".split(), flags.split()), world_size)

    return parse_with


def test_defaults_are_megatrons(run: Callable[..., Any], prefix: Path) -> None:
    config = run()
    assert config.model == ModelSettings.of(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=8,
        seq_length=32,
        max_position_embeddings=32,
        vocab_size=VOCAB,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=1e-5,
        tie_embeddings=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        init_method_std=0.02,
    )
    assert config.train.global_batch_size == 2
    assert config.train.num_microbatches == 1
    assert config.train.dtype == torch.float32
    assert config.train.seed == config.data.seed == 1234
    assert config.train.eval_interval is None
    assert config.optimizer.lr_decay_style == "linear"
    assert (config.optimizer.lr_decay_samples, config.optimizer.lr_warmup_samples) == (20, 0)
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.9, 0.999)
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.01, 1.0)
    assert config.data.blend == ((1.0, prefix),)
    assert config.data.split == Split(969, 30, 1)
    assert config.data.eod_token == VOCAB - 1
    assert config.log.log_interval == 100
    assert config.parallel.devices == DeviceSettings("cpu", "gloo", 10)
    assert config.notes == ()


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--swiglu", {"activation": "swiglu", "ffn_hidden_size": 128}),
        ("--swiglu --ffn-hidden-size 100", {"activation": "swiglu", "ffn_hidden_size": 100}),
        ("--group-query-attention", {"num_query_groups": 1, "group_query_attention": True}),
        (
            "--group-query-attention --num-query-groups 4",
            {"num_query_groups": 4, "group_query_attention": True},
        ),
        ("--kv-channels 32", {"kv_channels": 32}),
        ("--max-position-embeddings 64", {"max_position_embeddings": 64}),
        ("--disable-bias-linear", {"add_bias_linear": False}),
        ("--untie-embeddings-and-output-weights", {"tie_embeddings": False}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        (
            "--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5",
            {"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5},
        ),
        (
            "--position-embedding-type rope --rotary-base 999999.4420358813",
            {"position_embedding_type": "rope", "rotary_base": 999999.4420358813},
        ),
        (
            "--position-embedding-type rope --rotary-interleaved",
            {"position_embedding_type": "rope", "rotary_interleaved": True},
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32",
            {
                "position_embedding_type": "rope",
                "use_rope_scaling": True,
                "rope_scaling_factor": 32.0,
            },
        ),
        ("--squared-relu", {"activation": "squared_relu"}),
        ("--exact-gelu", {"activation": "exact_gelu"}),
        ("--relu", {"activation": "relu"}),
        ("--disable-bias-norm", {"add_bias_norm": False}),
        ("--no-pre-layernorm", {"pre_layernorm": False}),
        (
            "--residual-multiplier 0.22 --logit-multiplier 0.0625",
            {"residual_multiplier": 0.22, "logit_multiplier": 0.0625},
        ),
        (
            "--add-proj-bias --disable-bias-linear",
            {"add_bias_linear": False, "add_proj_bias": True},
        ),
        ("--add-qkv-bias --disable-bias-linear", {"add_bias_linear": False, "add_qkv_bias": True}),
        (
            "--normalization RMSNorm --norm-epsilon 1e-6",
            {"normalization": "RMSNorm", "norm_epsilon": 1e-6},
        ),
        ("--qk-layernorm", {"qk_layernorm": True}),
        (
            "--qk-layernorm --qk-layernorm-after-rotation --position-embedding-type rope",
            {
                "qk_layernorm": True,
                "qk_layernorm_after_rotation": True,
                "position_embedding_type": "rope",
            },
        ),
        (
            "--attention-dropout 0 --hidden-dropout 0.2",
            {"attention_dropout": 0.0, "hidden_dropout": 0.2},
        ),
        ("--init-method-std 0.01", {"init_method_std": 0.01}),
        (
            "--label-smoothing 0.1 --z-loss-coeff 1e-4 --logit-softcap 30",
            {"label_smoothing": 0.1, "z_loss_coeff": 1e-4, "logit_softcap": 30.0},
        ),
        ("--num_layers 6", {"num_layers": 6}),
        ("--vocab-size 4999", {"vocab_size": 5000}),
    ],
)
def test_a_model_flag_changes_its_attributes_alone(
    run: Callable[..., Any], flags: str, changes: dict[str, Any]
) -> None:
    assert values_of(run(flags).model) == values_of(run().model) | changes


@pytest.mark.parametrize(
    ("flags", "treatment", "shards", "padded"),
    [
        ("", "none", 1, 1024),
        ("--vocab-parallel none", "none", 1, 1024),
        ("--vocab-parallel vocab-1", "vocab-1", 4, 1024),
        ("--vocab-parallel vocab-2", "vocab-2", 4, 1024),
        ("--enable-vocab-parallel", "vocab-2", 4, 1024),
        ("--enable-vocab-parallel --disable-backward-fusion", "vocab-1", 4, 1024),
        ("--enable-vocab-parallel --vocab-parallel vocab-2", "vocab-2", 4, 1024),
        ("--make-vocab-size-divisible-by 1", "none", 1, 1000),
        ("--make-vocab-size-divisible-by 7", "none", 1, 1001),
        ("--make-vocab-size-divisible-by 7 --enable-vocab-parallel", "vocab-2", 4, 1008),
    ],
)
def test_treatment_of_the_vocabulary(
    run: Callable[..., Any], flags: str, treatment: str, shards: int, padded: int
) -> None:
    parallel = run(f"--pipeline-model-parallel-size 4 {flags}", world_size=4).parallel
    assert parallel.vocab_parallel == treatment
    assert parallel.vocab_shards == shards
    assert parallel.padded_vocab_size == padded
    assert parallel.pipeline.size == 4


def test_logits_that_are_not_kept(run: Callable[..., Any]) -> None:
    """A run may choose so anew, whatever model it loads: it is no fact of the model."""
    kept, again = run(), run("--vocab-recompute")
    assert not kept.parallel.vocabulary.vocab_recompute
    assert again.parallel == replace(kept.parallel, vocabulary=ShardSettings(vocab_recompute=True))
    assert again.model == kept.model


def test_length_in_samples(run: Callable[..., Any]) -> None:
    config = run("--global-batch-size 6 --train-samples 100")
    assert (config.train.train_iters, config.train.whole_batches_samples) == (16, 96)
    assert config.train.num_microbatches == 3
    assert config.optimizer.lr_decay_samples == 100


def test_iterations_of_growing_batches_are_counted_as_they_are(prefix: Path) -> None:
    """Batches of 2, 4, 6 and 8; of the first three each size for 8 / 3 samples."""
    growing = MOCK.replace("--train-iters 1", "--rampup-batch-size 2 2 8 --global-batch-size 8")
    config = parse([*growing.split(), "--train-iters", "50"], 1)
    assert config.train.train_iters == 50
    assert config.train.whole_batches_samples == 2 + 2 + 4 + 47 * 8 == 384
    [note] = config.notes
    assert note.startswith("--train-iters 50 counts the iterations with smaller batches too")
    assert "384 samples" in note
    same = parse([*growing.split(), "--train-samples", "384"], 1)
    assert (same.train.train_iters, same.train.rampup) == (50, config.train.rampup)
    assert same.optimizer == config.optimizer
    assert same.notes == ()


def test_the_earlier_line_of_gpt3_is_read() -> None:
    """Megatron-LM's own example had these two flags together, which Megatron-LM refuses."""
    lists = json.loads(Path(__file__).with_name("launch_lists.json").read_text())
    words = [word for flag in lists["M-LM gpt3_175b"]["flags"] for word in flag]
    at = words.index("--step-batch-size-schedule")
    words[at : words.index("--train-iters")] = ["--rampup-batch-size", "16", "16", "5859375"]
    found = read([*words, "--dry-run", "--vocab-size", "50257"], 128, speak=False)
    assert found.mistakes == ()
    assert any(note.startswith("--train-iters 500000 counts") for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "decay", "warmup"),
    [
        ("--lr-warmup-iters 3", 60, 18),
        ("--lr-warmup-fraction 0.1", 60, 6),
        ("--lr-warmup-iters 3 --lr-warmup-fraction 0", 60, 18),
        ("--lr-decay-iters 20 --lr-warmup-fraction 0.25", 120, 30),
        ("--train-samples 600 --lr-warmup-samples 7", 600, 7),
        ("--train-samples 600 --lr-decay-samples 50 --lr-warmup-fraction 0.5", 50, 25),
    ],
)
def test_learning_rate_spans_are_in_samples(
    run: Callable[..., Any], flags: str, decay: int, warmup: int
) -> None:
    optimizer = run(f"--global-batch-size 6 {flags}").optimizer
    assert (optimizer.lr_decay_samples, optimizer.lr_warmup_samples) == (decay, warmup)


@pytest.mark.parametrize(
    ("flags", "by_token", "notes"),
    [
        ("", True, 0),
        ("--eod-mask-loss", False, 0),
        ("--eod-mask-loss --calculate-per-token-loss", True, 0),
        ("--calculate-per-token-loss", True, 1),
    ],
)
def test_masked_microbatches_have_equal_weights_unless_tokens_are_asked_to(
    run: Callable[..., Any], flags: str, by_token: bool, notes: int
) -> None:
    config = run(flags)
    assert config.data.weighs_tokens_alike == by_token
    assert sum("--calculate-per-token-loss changes nothing" in n for n in config.notes) == notes


def test_training_and_logging_flags(run: Callable[..., Any], tmp_path: Path) -> None:
    config = run(
        "--bf16 --seed 7 --exit-interval 5 --eval-interval 4 --eval-iters 2 --eod-mask-loss "
        f"--data-cache-path {tmp_path} --split 8,2 --log-interval 1 --peak-tflops 0.5 --profile "
        f"--profile-step-start 2 --profile-step-end 4 --record-timeline {tmp_path}/timeline.json"
    )
    assert (config.train.dtype, config.train.seed, config.data.seed) == (torch.bfloat16, 7, 7)
    train = config.train
    assert (train.exit_interval, train.eval_interval, train.eval_iters) == (5, 4, 2)
    assert (config.data.eod_mask_loss, config.data.data_cache_path) == (True, tmp_path)
    assert config.data.split == Split(8, 2, 0)
    log = config.log
    assert (log.log_interval, log.peak_tflops, log.profile) == (1, 0.5, True)
    assert (log.profile_step_start, log.profile_step_end) == (2, 4)
    assert log.record_timeline == tmp_path / "timeline.json"


def test_mock_data_needs_a_vocabulary_and_nothing_else() -> None:
    config = parse(MOCK.split(), world_size=1)
    assert (config.data.mock_data, config.data.blend) == (True, ())
    assert (config.model.vocab_size, config.data.eod_token) == (99, 98)
    assert config.notes == ()


def test_flags_that_change_nothing_beside_others_are_noted() -> None:
    more = "--add-qkv-bias --split 1,1 --data-cache-path x"
    notes = parse(f"{MOCK} {more}".split(), world_size=1).notes
    assert [note.split(":")[0] for note in notes] == [
        "--add-qkv-bias changes nothing without --disable-bias-linear",
        "--data-cache-path x changes nothing with --mock-data",
        "--split 1,1 divides nothing",
    ]


def test_no_batches_means_no_evaluation(run: Callable[..., Any]) -> None:
    assert run("--eval-interval 4 --eval-iters 0").train.eval_interval is None


def test_a_blend_keeps_weights_and_order(run: Callable[..., Any], prefix: Path) -> None:
    config = run(data_path=f"0.3 {prefix} 2 {prefix}")
    assert config.data.blend == ((0.3, prefix), (2.0, prefix))


def test_the_last_of_a_repeated_flag_counts(run: Callable[..., Any]) -> None:
    assert run("--seed 1 --seed 2").train.seed == 2


def test_a_repeated_flag_is_replaced_with_a_note(run: Callable[..., Any]) -> None:
    """As in Megatron-LM, whose launch lines append what they override."""
    config = run("--seed 1 --train_iters 9 --train-iters=8 --seed 2")
    assert (config.train.seed, config.train.train_iters) == (2, 8)
    assert config.notes == (
        "--train-iters 9 changes nothing: --train-iters 8 stands after it",
        "--seed 1 changes nothing: --seed 2 stands after it",
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--use-rotary-position-embeddings --position-embedding-type learned_absolute",
        "--position-embedding-type learned_absolute --use-rotary-position-embeddings",
    ],
)
def test_two_spellings_that_contradict_each_other_are_refused(
    run: Callable[..., Any], flags: str
) -> None:
    with pytest.raises(ValueError, match=r"contradicts .* give one of them"):
        run(flags)


def test_a_flag_given_again_with_the_same_value_is_noted(run: Callable[..., Any]) -> None:
    config = run("--seed 1 --swiglu --seed 1 --swiglu --seed 1")
    assert (config.train.seed, config.model.mlp.activation) == (1, "swiglu")
    assert config.notes == (
        "--seed 1 changes nothing: --seed 1 stands before it",
        "--swiglu changes nothing: --swiglu stands before it",
    )
    read, note = run("--use-rotary-position-embeddings --position-embedding-type rope").notes
    assert read == "--use-rotary-position-embeddings is read as --position-embedding-type rope"
    assert note.startswith("--position-embedding-type rope changes nothing: --use-rotary")


def test_flags_that_ask_for_what_always_holds_are_granted_with_a_note(
    run: Callable[..., Any],
) -> None:
    flags = "--log-throughput --use_mcore_models --ds-sequence-parallel-size 1 --fp8-interval=1"
    config = run(flags + " --log-throughput")
    assert [note.split(" changes nothing")[0] for note in config.notes] == [
        "--log-throughput",
        "--use-mcore-models",
        "--ds-sequence-parallel-size 1",
        "--fp8-interval 1",
    ]
    assert vars(config) | {"notes": ()} == vars(run())

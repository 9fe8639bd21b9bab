"""pretrain_gpt.sh turns environment variables into one torchrun line, or refuses them.

The script runs with ``DRY_RUN=1``: it prints the line, and installs, prepares and starts nothing.
The machine is made up by stand-ins for ``nvidia-smi``, ``nproc`` and ``ldconfig``.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.made_up_machine import ALLOCATOR, ROOT, Machine

from megatron.parallel.environment import NCCL_ENVIRONMENT


@pytest.fixture
def cpu(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def gpus(tmp_path: Path) -> Machine:
    return Machine(tmp_path, gpus=8)


def test_gpus_get_one_rank_each_and_the_sizes_of_the_original(gpus: Machine) -> None:
    line = gpus.line()
    assert line.torchrun["--nproc-per-node"] == "8"
    expected = {
        "--pipeline-model-parallel-size": "8",
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--ffn-hidden-size": "16384",
        "--num-attention-heads": "32",
        "--seq-length": "2048",
        "--max-position-embeddings": "2048",
        "--micro-batch-size": "1",
        "--global-batch-size": "24",
        "--train-iters": "1000",
        "--bf16": "",
    }
    assert {flag: line.training.get(flag) for flag in expected} == expected
    assert not ALLOCATOR & line.environment.keys()


@pytest.mark.parametrize(
    ("libraries", "variables", "preloaded", "configured"),
    [
        (["libjemalloc.so.2"], {}, "libjemalloc.so.2", "dirty_decay_ms:-1,muzzy_decay_ms:-1"),
        (["libc.so.6", "libjemalloc.so.2"], {"MALLOC_CONF": "a:b"}, "libjemalloc.so.2", "a:b"),
        (["libjemalloc.so.1", "notlibjemalloc.so.2"], {}, None, None),
        (["libjemalloc.so.2"], {"LD_PRELOAD": ""}, None, None),
        ([], {}, None, None),
    ],
)
def test_jemalloc_is_preloaded_where_it_is_installed_and_nobody_objects(
    tmp_path: Path,
    libraries: list[str],
    variables: dict[str, str],
    preloaded: str | None,
    configured: str | None,
) -> None:
    environment = Machine(tmp_path, libraries=libraries).line(**variables).environment
    assert environment.get("LD_PRELOAD") == preloaded
    assert environment.get("MALLOC_CONF") == configured
    assert environment["MALLOC_MMAP_MAX_"] == "0"


def test_gpus_keep_their_allocator(tmp_path: Path) -> None:
    line = Machine(tmp_path, gpus=2, libraries=["libjemalloc.so.2"]).line()
    assert not ALLOCATOR & line.environment.keys()


def test_gpus_get_a_connection_for_every_stream(gpus: Machine) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert gpus.line().environment[name] == NCCL_ENVIRONMENT[name]
    assert gpus.line(CUDA_DEVICE_MAX_CONNECTIONS=8).environment[name] == "8"


def test_no_gpus_need_no_connections(cpu: Machine) -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in cpu.line().environment


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 3), (4, 4), (64, 4)])
def test_cores_get_one_rank_each_from_2_to_4(tmp_path: Path, cores: int, ranks: int) -> None:
    line = Machine(tmp_path, cores=cores).line()
    assert line.torchrun["--nproc-per-node"] == str(ranks)
    assert line.training["--pipeline-model-parallel-size"] == str(ranks)
    assert int(line.training["--num-layers"]) % ranks == 0
    assert line.environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("visible", "ranks"), [("2,5", 2), ("GPU-1", 1), ("", 3), ("-1", 3)])
def test_hidden_gpus_are_not_used(tmp_path: Path, visible: str, ranks: int) -> None:
    """Without a visible GPU the three cores get a rank each."""
    line = Machine(tmp_path, gpus=8, cores=3).line(CUDA_VISIBLE_DEVICES=visible)
    assert line.torchrun["--nproc-per-node"] == str(ranks)


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, set()),
        ({"VOCAB_PARALLEL": "0", "FB_SPLIT": ""}, set()),
        ({"VOCAB_PARALLEL": "1"}, {"--enable-vocab-parallel"}),
        ({"VOCAB_PARALLEL": "false"}, {"--enable-vocab-parallel"}),
        ({"FB_SPLIT": "1", "INTERLACED_SCHEDULE": "1"}, set()),
        (
            {"VOCAB_PARALLEL": "1", "FB_SPLIT": "1"},
            {"--enable-vocab-parallel", "--disable-backward-fusion"},
        ),
        (
            {"VOCAB_PARALLEL": "1", "INTERLACED_SCHEDULE": "1"},
            {"--enable-vocab-parallel", "--use-interlaced-schedule"},
        ),
        (
            {"VOCAB_PARALLEL": "1", "INTERLACED_SCHEDULE": "1", "FB_SPLIT": "1"},
            {"--enable-vocab-parallel", "--use-interlaced-schedule"},
        ),
        ({"ENABLE_LAYER_REDISTRIBUTION": "1"}, {"--enable-layer-redistribution"}),
        (
            {"ENABLE_LAYER_REDISTRIBUTION": "1", "FINAL_STAGE_LAYERS": "0"},
            {"--enable-layer-redistribution", "--final-stage-num-layers"},
        ),
        ({"FINAL_STAGE_LAYERS": "4"}, set()),
    ],
)
def test_the_treatment_of_the_vocabulary(
    cpu: Machine, variables: dict[str, str], flags: set[str]
) -> None:
    training = cpu.line(**variables).training
    known = {
        "--enable-vocab-parallel",
        "--disable-backward-fusion",
        "--use-interlaced-schedule",
        "--enable-layer-redistribution",
        "--final-stage-num-layers",
    }
    assert training.keys() & known == flags


def test_layers_of_the_last_stage(cpu: Machine) -> None:
    line = cpu.line(ENABLE_LAYER_REDISTRIBUTION=1, FINAL_STAGE_LAYERS=3)
    assert line.training["--final-stage-num-layers"] == "3"


def test_every_size_reaches_its_flag(cpu: Machine) -> None:
    sizes = {
        "PIPELINE_SIZE": ("--pipeline-model-parallel-size", 3),
        "LAYERS": ("--num-layers", 6),
        "HIDDEN_SIZE": ("--hidden-size", 96),
        "IMM_SIZE": ("--ffn-hidden-size", 100),
        "ATTENTION_HEADS": ("--num-attention-heads", 12),
        "GQA": ("--num-query-groups", 3),
        "SEQ_LENGTH": ("--seq-length", 77),
        "MICRO_BATCH_SIZE": ("--micro-batch-size", 2),
        "GLOBAL_BATCH_SIZE": ("--global-batch-size", 10),
        "EXIT_INTERVAL": ("--train-iters", 11),
        "LOG_INTERVAL": ("--log-interval", 5),
        "EVAL_INTERVAL": ("--eval-interval", 4),
    }
    line = cpu.line(**{name: value for name, (_, value) in sizes.items()})
    assert {f: line.training[f] for f, _ in sizes.values()} == {
        flag: str(value) for flag, value in sizes.values()
    }
    assert line.training["--max-position-embeddings"] == "77"
    assert line.torchrun["--nproc-per-node"] == "3"


def test_sizes_that_follow_from_others(cpu: Machine) -> None:
    training = cpu.line(PIPELINE_SIZE=3, HIDDEN_SIZE=64, MICRO_BATCH_SIZE=2).training
    assert training["--ffn-hidden-size"] == "256"
    assert training["--global-batch-size"] == "18"
    assert not training.keys() & {"--group-query-attention", "--num-query-groups"}


def test_the_width_of_the_mlp_has_two_names(cpu: Machine) -> None:
    assert cpu.line(FFN_HIDDEN_SIZE=100) == cpu.line(IMM_SIZE=100)
    assert cpu.line(FFN_HIDDEN_SIZE=100, IMM_SIZE=100) == cpu.line(IMM_SIZE=100)
    assert "FFN_HIDDEN_SIZE=200" in cpu.refusal(FFN_HIDDEN_SIZE=200, IMM_SIZE=100)


def test_precision_and_profile(gpus: Machine) -> None:
    assert "--bf16" not in gpus.line(FP32=1).training
    assert "--profile" not in gpus.line(PROFILED=0).training
    assert "--profile-dir" not in gpus.line(PROFILED=1).training
    assert "--profile" in gpus.line(PROFILED=1).training
    assert gpus.line(PROFILED=1, AIP_RUN_NAME="a").training["--profile-dir"] == "profile/a"


def test_the_command_line_comes_last_and_unchanged(cpu: Machine) -> None:
    done = cpu.run("--lr", "0.5", "--data-cache-path", "a folder")
    assert shlex.split(done.stdout)[-4:] == ["--lr", "0.5", "--data-cache-path", "a folder"]


@pytest.mark.parametrize(("machine", "share"), [("cpu", "0.3"), ("gpus", "0.1")])
def test_the_small_batches_of_a_laptop_get_a_longer_warm_up(
    machine: str, share: str, request: pytest.FixtureRequest
) -> None:
    training = request.getfixturevalue(machine).line().training
    assert training["--lr-warmup-fraction"] == share


@pytest.mark.parametrize(
    ("hidden", "rate"), [(64, 2e-3), (128, 2e-3), (256, 1e-3), (512, 5e-4), (1000, 2.56e-4)]
)
def test_the_rate_of_a_laptop_falls_with_the_width(cpu: Machine, hidden: int, rate: float) -> None:
    """0.256 / h, and 2e-3 at most; a tenth of it in the end."""
    training = cpu.line(HIDDEN_SIZE=hidden).training
    assert float(training["--lr"]) == pytest.approx(rate)
    assert float(training["--min-lr"]) == pytest.approx(rate / 10)


@pytest.mark.parametrize(
    "flag",
    [
        "--global-batch-size 6",
        "--rampup-batch-size 2 2 24",
        "--batch-size-steps 0:2 24:6",
        "--step-batch-size-schedule 0:2",
    ],
)
def test_an_own_batch_on_a_laptop_has_microbatches_of_one_sample(cpu: Machine, flag: str) -> None:
    assert cpu.line(*flag.split()).training["--micro-batch-size"] == "1"
    assert cpu.line(*flag.split(), MICRO_BATCH_SIZE=2).training["--micro-batch-size"] == "2"


@pytest.mark.parametrize("variables", [{"TP_SIZE": 2}, {"GQA": 4}])
def test_heads_of_a_narrow_model_can_be_shared(cpu: Machine, variables: dict[str, int]) -> None:
    training = cpu.line(HIDDEN_SIZE=96, **variables).training
    assert training["--num-attention-heads"] == "8"
    assert cpu.line(HIDDEN_SIZE=96).training["--num-attention-heads"] == "3"


class Laptop(Machine):
    """A machine without GPUs on which the script runs to the end: the environment is a stand-in."""

    def __init__(self, folder: Path, answer: str) -> None:
        super().__init__(folder, cores=2)
        (folder / "venv/bin").mkdir(parents=True)
        self.asked = folder / "asked"
        for name, script in {
            "venv/bin/python": f"""case "$*" in
  *first_model.py*) echo "$*" >>{self.asked}; printf '{answer}' ;;
  *sample_data.py*) echo DATA_PATH=data; echo TOKENIZER_MODEL=model ;;
esac""",
            "venv/bin/torchrun": "true",
            "uname": f"echo {folder}",  # so that no other test has asked for this machine
        }.items():
            self.stand_in(name, script)

    def started(self, *flags: str, **variables: str | int) -> dict[str, str]:
        """Return the training flags of the line that the script prints and runs."""
        return self.line(*flags, DRY_RUN="", VENV=str(self.folder / "venv"), **variables).training


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    kept = set((ROOT / ".cache").glob("sizes-*"))
    yield Laptop(tmp_path, r"PRECISION=fp32\nHIDDEN_SIZE=96\nMICRO_BATCH_SIZE=2\n")
    for file in set((ROOT / ".cache").glob("sizes-*")) - kept:
        file.unlink()


def test_a_timing_chooses_the_model_once(laptop: Laptop) -> None:
    first = laptop.started(VOCAB_SIZE="8k")
    expected = {
        "--hidden-size": "96",
        "--ffn-hidden-size": "384",
        "--num-attention-heads": "3",
        "--micro-batch-size": "2",
        "--global-batch-size": "12",
        "--lr": "2.00e-03",
    }
    assert {flag: first[flag] for flag in expected} == expected
    assert "--bf16" not in first
    (asked,) = laptop.asked.read_text().splitlines()
    words = "--ranks 2 --cores 2 --layers 4 --seq-length 64 --microbatches 6 --vocab-size 8000"
    assert asked.endswith(f"tools/first_model.py {words}")
    assert laptop.started(VOCAB_SIZE="8k", VOCAB_PARALLEL=1).items() > first.items()
    assert len(laptop.asked.read_text().splitlines()) == 1, "both runs are of one model"
    laptop.started(VOCAB_SIZE="32k")
    assert len(laptop.asked.read_text().splitlines()) == 2


def test_explicit_sizes_are_told_to_the_timing(laptop: Laptop) -> None:
    laptop.started(HIDDEN_SIZE=96, ATTENTION_HEADS=6, FP32=1, SEQ_LENGTH=32, PIPELINE_SIZE=4)
    words = laptop.asked.read_text().split()[1:]
    asked = dict(zip(words[::2], words[1::2], strict=True))
    assert asked["--hidden-size"] == "96"
    assert asked["--heads"] == "6"
    assert asked["--precision"] == "fp32"
    assert (asked["--ranks"], asked["--layers"], asked["--microbatches"]) == ("4", "8", "12")
    assert (asked["--seq-length"], asked["--vocab-size"]) == ("32", "256000")


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ((), {"HIDDEN_SIZE": 64, "MICRO_BATCH_SIZE": 1}),
        (("--hidden-size", "64"), {}),
        (("--micro_batch_size=1",), {}),
        ((), {"DATA_PATH": "/data", "TOKENIZER_MODEL": "/model"}),
        ((), {"GLOBAL_BATCH_SIZE": 6, "HIDDEN_SIZE": 64}),
    ],
)
def test_what_the_user_has_decided_needs_no_timing(
    laptop: Laptop, flags: tuple[str, ...], variables: dict[str, str | int]
) -> None:
    laptop.started(*flags, **variables)
    assert not laptop.asked.exists()


def test_without_an_answer_the_usual_sizes_stay(tmp_path: Path) -> None:
    training = Laptop(tmp_path, "").started(VOCAB_SIZE="8k")
    assert (training["--hidden-size"], training["--micro-batch-size"]) == ("256", "4")


def test_an_own_length_or_warm_up_takes_the_place_of_ours(cpu: Machine) -> None:
    training = cpu.line("--train-samples", "600", "--lr-warmup-samples", "60").training
    assert not training.keys() & {"--train-iters", "--lr-warmup-fraction", "--exit-interval"}


@pytest.mark.parametrize(
    ("own", "gone", "kept"),
    [
        (("--lr", "1e-4"), {"--min-lr", "--lr-decay-style"}, set()),
        (("--lr-decay-style=constant",), {"--min-lr"}, {"--lr"}),
        (("--min_lr", "0"), {"--lr-decay-style"}, {"--lr"}),
        (("--train_iters", "7"), {"--train-iters"}, {"--lr", "--min-lr"}),
        (("--lr_warmup_iters", "7"), {"--lr-warmup-fraction"}, {"--lr", "--min-lr"}),
        (("--eval-interval", "7"), set(), {"--eval-iters"}),
        (("--vocab-parallel", "none"), {"--enable-vocab-parallel"}, {"--lr"}),
    ],
)
def test_an_own_flag_takes_the_place_of_what_does_not_go_with_it(
    cpu: Machine, own: tuple[str, ...], gone: set[str], kept: set[str]
) -> None:
    words = shlex.split(cpu.run(*own, VOCAB_PARALLEL=1).stdout)[: -len(own)]
    assert not gone & set(words)
    assert kept <= set(words)


def test_without_an_interval_there_is_no_evaluation(cpu: Machine) -> None:
    assert not cpu.line().training.keys() & {"--eval-interval", "--eval-iters"}
    assert cpu.line(EVAL_INTERVAL=5).training["--eval-iters"] == "10"


def test_python_must_find_the_gpus_that_the_script_found(gpus: Machine) -> None:
    assert gpus.line().training["--device"] == "cuda"


def test_python_must_not_find_gpus_that_the_script_did_not(cpu: Machine) -> None:
    assert cpu.line().training["--device"] == "cpu"


def test_more_stages_than_ranks_is_not_data_parallelism(gpus: Machine) -> None:
    assert "more than the 1 x 8 ranks" in gpus.refusal(PIPELINE_SIZE=16)


def test_exit_interval_ends_a_run_of_an_own_length(cpu: Machine) -> None:
    training = cpu.line("--train-iters", "500", EXIT_INTERVAL=40).training
    assert training["--train-iters"] == "500"
    assert training["--exit-interval"] == "40"


def test_an_own_data_set(cpu: Machine) -> None:
    training = cpu.line(DATA_PATH="/data/my text", TOKENIZER_MODEL="/data/t.model").training
    assert training["--data-path"] == "/data/my text"
    assert training["--tokenizer-model"] == "/data/t.model"


def test_extra_options_come_before_the_command_line(cpu: Machine) -> None:
    done = cpu.run("--seed", "2", EXTRA_OPTIONS=" --seed 1\n  --lr 0.5 ")
    assert shlex.split(done.stdout)[-6:] == ["--seed", "1", "--lr", "0.5", "--seed", "2"]
    assert "--min-lr" not in cpu.line(EXTRA_OPTIONS="--lr 0.5").training


@pytest.mark.parametrize("size", ["1k", "8k", "32k", "256k"])
def test_both_spellings_of_a_vocabulary_size(cpu: Machine, size: str) -> None:
    assert cpu.line(VOCAB_SIZE=size) == cpu.line(VOCAB_SIZE=size.replace("k", "000"))
    assert size in cpu.line(VOCAB_SIZE=size).training["--data-path"]


def test_one_node_takes_a_free_port_unless_told(cpu: Machine) -> None:
    assert "--standalone" in cpu.line().torchrun
    line = cpu.line(MASTER_PORT=4321)
    assert line.torchrun["--master-port"] == "4321"
    assert "--standalone" not in line.torchrun


def test_several_nodes(gpus: Machine) -> None:
    line = gpus.line(WORLD_SIZE=4, RANK=3, MASTER_ADDR="node0", GPUS_PER_NODE=2)
    expected = {
        "--nnodes": "4",
        "--node-rank": "3",
        "--master-addr": "node0",
        "--master-port": "10086",
        "--nproc-per-node": "2",
    }
    assert line.torchrun == expected
    assert line.training["--pipeline-model-parallel-size"] == "8"


def test_tensor_parallel_ranks_leave_fewer_to_the_pipeline(gpus: Machine) -> None:
    shared = gpus.line(TP_SIZE=2, SEQUENCE_PARALLEL=1)
    alone = gpus.line()
    assert shared.torchrun["--nproc-per-node"] == alone.torchrun["--nproc-per-node"]
    sizes = ("--pipeline-model-parallel-size", "--global-batch-size")
    assert [2 * int(shared.training[name]) for name in sizes] == [
        int(alone.training[name]) for name in sizes
    ]
    assert shared.training["--tensor-model-parallel-size"] == "2"
    assert "--sequence-parallel" in shared.training
    assert "--tensor-model-parallel-size" not in alone.training


def test_without_gpus_a_replica_has_its_ranks(cpu: Machine) -> None:
    line = cpu.line(TP_SIZE=2, PIPELINE_SIZE=2)
    assert line.torchrun["--nproc-per-node"] == "4"
    assert "--sequence-parallel" not in line.training


def test_ranks_that_share_sequences_leave_fewer_to_the_pipeline(gpus: Machine) -> None:
    shared, alone = gpus.line(CP_SIZE=2, TP_SIZE=2), gpus.line()
    sizes = ("--pipeline-model-parallel-size", "--global-batch-size")
    assert [4 * int(shared.training[name]) for name in sizes] == [
        int(alone.training[name]) for name in sizes
    ]
    assert shared.training["--context-parallel-size"] == "2"
    assert shared.training["--tensor-model-parallel-size"] == "2"
    assert "--context-parallel-size" not in alone.training


def test_without_gpus_a_replica_of_shared_sequences_has_its_ranks(cpu: Machine) -> None:
    line = cpu.line(CP_SIZE=3, PIPELINE_SIZE=2)
    assert line.torchrun["--nproc-per-node"] == "6"
    assert int(line.training["--global-batch-size"]) == 6 * int(line.training["--micro-batch-size"])


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {"VOCAB_PARALLEL": 1, "ENABLE_LAYER_REDISTRIBUTION": 1},
            ["ENABLE_LAYER_REDISTRIBUTION=1", "VOCAB_PARALLEL=1", "unset one"],
        ),
        (
            {"TP_SIZE": 2, "PIPELINE_SIZE": 3, "GPUS_PER_NODE": 4},
            ["TP_SIZE=2 x PIPELINE_SIZE=3", "GPUS_PER_NODE", "lower it"],
        ),
        ({"TP_SIZE": 2, "PIPELINE_SIZE": 2, "GPUS_PER_NODE": 6}, ["TP_SIZE=2", "multiple of 4"]),
        (
            {"CP_SIZE": 2, "TP_SIZE": 2, "PIPELINE_SIZE": 2, "GPUS_PER_NODE": 4},
            ["TP_SIZE=2 x CP_SIZE=2 x PIPELINE_SIZE=2", "GPUS_PER_NODE", "lower it"],
        ),
        ({"CP_SIZE": 3, "PIPELINE_SIZE": 1, "GPUS_PER_NODE": 4}, ["CP_SIZE=3", "multiple of 3"]),
        ({"CP_SIZE": 0}, ["CP_SIZE=0", "at least 1"]),
        *(
            ({name: 10**12}, [f"{name}=1000000000000", "at most 65535"])
            for name in ("TP_SIZE", "CP_SIZE", "PIPELINE_SIZE")
        ),
        (
            {"TP_SIZE": 60000, "CP_SIZE": 50000},
            ["TP_SIZE=60000 x CP_SIZE=50000", "3000000000 ranks", "lower it"],
        ),
        ({"INTERLEAVED_1F1B": 1, "INTERLEAVE_GROUP": 2}, ["INTERLEAVE_GROUP=2", "not built"]),
        ({"VOCAB_SIZE": "8kB"}, ["VOCAB_SIZE=8kB", "8k or 8000"]),
        ({"VOCAB_SIZE": "0"}, ["VOCAB_SIZE=0", "8k or 8000"]),
        ({"DATA_PATH": "/data/x"}, ["DATA_PATH='/data/x'", "TOKENIZER_MODEL", "both"]),
        (
            {"DATA_PATH": "/d", "TOKENIZER_MODEL": "/t", "VOCAB_SIZE": "32k"},
            ["VOCAB_SIZE=32k", "unset"],
        ),
        ({"LAYERS": "four"}, ["LAYERS=four", "whole number of at least 1"]),
        ({"GLOBAL_BATCH_SIZE": 0}, ["GLOBAL_BATCH_SIZE=0", "at least 1"]),
        ({"HIDDEN_SIZE": -8}, ["HIDDEN_SIZE=-8"]),
        ({"SEQ_LENGTH": "010"}, ["SEQ_LENGTH=010"]),
        ({"WORLD_SIZE": 2}, ["WORLD_SIZE=2", "RANK", "MASTER_ADDR"]),
        ({"WORLD_SIZE": 10**9}, ["WORLD_SIZE=1000000000", "at least 1 and at most 65535"]),
        ({"MASTER_PORT": 65536}, ["MASTER_PORT=65536", "at least 1 and at most 65535"]),
        ({"MASTER_PORT": "ten"}, ["MASTER_PORT=ten", "at least 1 and at most 65535"]),
        ({"RANK": 1}, ["RANK=1", "WORLD_SIZE=1"]),
        ({"PIPELINE_SIZE": 4, "GPUS_PER_NODE": 2}, ["PIPELINE_SIZE=4", "GPUS_PER_NODE"]),
    ],
)
def test_refusals_name_the_variable_its_value_and_the_way_out(
    cpu: Machine, variables: dict[str, str | int], parts: list[str]
) -> None:
    message = cpu.refusal(**variables)
    assert [part for part in parts if part not in message] == []


def test_a_host_that_nobody_knows_ends_the_launch(cpu: Machine) -> None:
    """It is asked for again for a while, as a name server may be late; torchrun would hang."""
    asked = cpu.folder / "asked"
    cpu.stand_in("getent", f"echo $2 >> {asked}; exit 2")
    cpu.stand_in("sleep", "exit 0")
    message = cpu.refusal(WORLD_SIZE=2, RANK=1, MASTER_ADDR="typo", DRY_RUN=0)
    assert "MASTER_ADDR=typo is no host that this machine knows: set it" in message
    assert asked.read_text().split() == ["typo"] * 16


@pytest.mark.parametrize(
    ("variables", "idle"),
    [
        ({"FINAL_STAGE_LAYERS": 0}, ["FINAL_STAGE_LAYERS=0"]),
        ({"FB_SPLIT": "x", "INTERLACED_SCHEDULE": 1}, ["FB_SPLIT=x", "INTERLACED_SCHEDULE=1"]),
        ({"VOCAB_PARALLEL": 1, "FB_SPLIT": 1, "INTERLACED_SCHEDULE": 1}, ["FB_SPLIT=1"]),
        ({"ZERO_BUBBLE_MEM_LIMIT": 4}, ["ZERO_BUBBLE_MEM_LIMIT=4"]),
        ({"ENABLE_ZERO_BUBBLE": 1, "ZERO_BUBBLE_MEM_LIMIT": 4}, []),
        (
            {"ZERO_BUBBLE_TIMER_START": 3, "SYNC_OPTIMIZER": 1},
            ["ZERO_BUBBLE_TIMER_START=3", "SYNC"],
        ),
        (
            {"ENABLE_ZERO_BUBBLE": 1, "ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP": "min"},
            ["ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP=min"],
        ),
        ({"OFFLOAD_TIME": 0.2, "NO_BARRIER": 1}, ["OFFLOAD_TIME=0.2", "NO_BARRIER=1"]),
        (
            {"SCHEDULE_TIMER_START": 40, "SCHEDULE_TIMER_END": 41, "EXIT_INTERVAL": 40},
            ["SCHEDULE_TIMER_START=40", "SCHEDULE_TIMER_END=41"],
        ),
        ({"SCHEDULE_TIMER_END": 9}, ["SCHEDULE_TIMER_END=9"]),
        ({"AIP_RUN_NAME": "a"}, ["AIP_RUN_NAME=a"]),
        ({"FB_SPLIT": 0, "SYNC_OPTIMIZER": 0, "OFFLOAD": 0}, []),
        ({"MASTER_ADDR": "node0"}, ["MASTER_ADDR=node0"]),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": 12345}, []),
    ],
)
def test_a_variable_without_effect_is_noted(
    cpu: Machine, variables: dict[str, str | int], idle: list[str]
) -> None:
    done = cpu.run(**variables)
    assert done.returncode == 0, done.stderr
    notes = done.stderr.splitlines()
    assert len(notes) == len(idle)
    for note, name in zip(notes, idle, strict=True):
        assert note.startswith(f"note: {name}")
        assert "changes nothing: " in note


V = "--zero-bubble-v-schedule"
LIMIT, SETUP = "--zero-bubble-max-pending-backward", f"{V}-mem-setup"
TIMERS = {"--profile-schedule-start": "5", "--profile-schedule-end": "9", "--replan": ""}
POST = {"--enable-optimizer-post-validation": ""}


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, {}),
        ({"ENABLE_ZERO_BUBBLE": 1}, {"--enable-zero-bubble": "", LIMIT: "8", **POST}),
        (
            {"ENABLE_ZERO_BUBBLE": 1, "ZERO_BUBBLE_MEM_LIMIT": 5, "FP32": 1},
            {"--enable-zero-bubble": "", LIMIT: "5"},
        ),
        (
            {"ENABLE_ZERO_BUBBLE": 1, "ENABLE_OPTIMIZER_POST_VALIDATION": 0},
            {"--enable-zero-bubble": "", LIMIT: "8"},
        ),
        ({"ENABLE_OPTIMIZER_POST_VALIDATION": "on"}, POST),
        (
            {"ZERO_BUBBLE_V_SCHEDULE": 1, "SYNC_OPTIMIZER": 1},
            {"--enable-zero-bubble": "", V: ""},
        ),
        (
            {
                "ZERO_BUBBLE_V_SCHEDULE": 1,
                "ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP": "half",
                "ZERO_BUBBLE_MEM_LIMIT": 8,
            },
            {"--enable-zero-bubble": "", V: "", SETUP: "half", LIMIT: "8", **POST},
        ),
        ({"INTERLEAVED_1F1B": 1}, {"--num-layers-per-virtual-pipeline-stage": "1"}),
        ({"OFFLOAD": 1, "OFFLOAD_CHUNK_NUM": 2}, {"--cpu-offload": "", "--offload-chunk-num": "2"}),
        ({"ENABLE_EXACTLY_NUMERIC_MATCH": 1}, {"--enable-exactly-numeric-match": ""}),
        ({"SCHEDULE_TIMER_START": 5, "SCHEDULE_TIMER_END": 9}, TIMERS),
        ({"ZERO_BUBBLE_TIMER_START": 5, "ZERO_BUBBLE_TIMER_END": 9}, {}),
        (
            {"ENABLE_ZERO_BUBBLE": 1, "ZERO_BUBBLE_TIMER_START": 5, "ZERO_BUBBLE_TIMER_END": 9},
            {"--enable-zero-bubble": "", LIMIT: "8", **POST, **TIMERS},
        ),
    ],
)
def test_the_variables_of_the_zero_bubble_fork(
    cpu: Machine, variables: dict[str, str | int], flags: dict[str, str]
) -> None:
    """They reach their flags, and these flags only; p is 4."""
    training = cpu.line(PIPELINE_SIZE=4, **variables).training
    plain = cpu.line(PIPELINE_SIZE=4, FP32=variables.get("FP32", "")).training
    assert {flag: training[flag] for flag in training.keys() - plain.keys()} == flags
    assert plain.items() <= training.items()


def test_the_recipe_of_the_original(gpus: Machine) -> None:
    """Every flag of its script's that sets rate, warm-up, clipping, precision and length."""
    training = gpus.line(ORIGINAL_RECIPE=1, EXIT_INTERVAL=20).training
    expected = {
        "--train-samples": "146484375",
        "--lr-decay-samples": "126953125",
        "--lr-warmup-samples": "183105",
        "--lr": "6.0e-5",
        "--min-lr": "6.0e-6",
        "--lr-decay-style": "cosine",
        "--clip-grad": "8.0",
        "--weight-decay": "0.1",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--init-method-std": "0.006",
        "--initial-loss-scale": "65536",
        "--fp16": "",
        "--exit-interval": "20",
    }
    assert {flag: training.get(flag) for flag in expected} == expected
    assert not training.keys() & {"--bf16", "--train-iters", "--lr-warmup-fraction"}
    fp32 = gpus.line(ORIGINAL_RECIPE=1, FP32=1).training
    assert not fp32.keys() & {"--bf16", "--fp16", "--initial-loss-scale"}


@pytest.mark.parametrize("own", ["--fp16", "--bf16"])
def test_an_own_precision_replaces_ours(gpus: Machine, own: str) -> None:
    for recipe in ("", "1"):
        training = gpus.line(own, ORIGINAL_RECIPE=recipe).training
        assert training.keys() & {"--bf16", "--fp16", "--initial-loss-scale"} == {own}


def test_more_ranks_than_gpus_are_refused(gpus: Machine) -> None:
    assert "GPUS_PER_NODE=9" in gpus.refusal(GPUS_PER_NODE=9)


def test_the_ranks_of_a_smaller_pipeline_are_its_replicas(gpus: Machine) -> None:
    line = gpus.line(PIPELINE_SIZE=4)
    assert line.torchrun["--nproc-per-node"] == "8"
    assert line.training["--pipeline-model-parallel-size"] == "4"
    assert line.training["--global-batch-size"] == "24"
    assert gpus.line(PIPELINE_SIZE=4, GPUS_PER_NODE=4).training["--global-batch-size"] == "12"
    assert "PIPELINE_SIZE=3 does not divide" in gpus.refusal(PIPELINE_SIZE=3)


def test_flags_may_name_data_and_tokenizer_in_place_of_the_sample(cpu: Machine) -> None:
    both = ("--data-path", "my", "--tokenizer-type", "HuggingFaceTokenizer")
    assert cpu.line(*both).training["--data-path"] == "my"
    assert "--tokenizer-model" not in cpu.line(*both).training
    sampled = cpu.line("--data-path", "my").training
    assert sampled["--data-path"] == "my"
    assert sampled["--tokenizer-model"].startswith("SAMPLE_TOKENIZER_")


def test_flags_of_a_file_count_as_if_they_were_typed(cpu: Machine, tmp_path: Path) -> None:
    """The line keeps the file, and leaves out the script's flags that the file's flags replace."""
    file = tmp_path / "own.flags"
    lines = ("--lr 1e-3  # no rate of the script", "--train-samples 99", "--vocab_parallel=none")
    file.write_text("\n".join([*lines, "--hidden_size 320", "--split=9,1,0"]))
    done = cpu.run(f"@{file}", "--seed", "2", VOCAB_PARALLEL=1)
    words = shlex.split(done.stdout)
    assert words[-3:] == [f"@{file}", "--seed", "2"]
    absent = {"--lr", "--lr-decay-style", "--train-iters", "--enable-vocab-parallel"}
    absent |= {"--hidden-size", "--split"}
    assert absent.isdisjoint(words)
    assert {"--num-layers", "--clip-grad"} < set(words)


def test_a_variable_that_a_flag_file_replaces_is_told(cpu: Machine, tmp_path: Path) -> None:
    file = tmp_path / "own.flags"
    file.write_text("--hidden-size 320\n")
    done = cpu.run(f"@{file}", HIDDEN_SIZE=512, SEQ_LENGTH=128)
    assert "note: HIDDEN_SIZE=512 changes nothing: --hidden-size replaces it" in done.stderr
    assert "SEQ_LENGTH=128 changes nothing" not in done.stderr
    words = shlex.split(done.stdout)
    assert "--hidden-size" not in words
    assert words[words.index("--seq-length") + 1] == "128"


def test_a_mistake_in_a_flag_file_ends_the_script(cpu: Machine, tmp_path: Path) -> None:
    file = tmp_path / "own.flags"
    file.write_text("lr 1\n")
    assert f"{file}, line 1: 'lr' is no flag" in cpu.refusal(f"@{file}")

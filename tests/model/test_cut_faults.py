"""What does not cut evenly is told with its flag; what is told cannot be built."""

import pytest

from megatron.model.cut_faults import faults_of_cut
from megatron.model.settings import ModelSettings

CONFIG = ModelSettings.of(
    num_layers=2,
    hidden_size=96,
    ffn_hidden_size=360,
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=8,
    seq_length=30,
    max_position_embeddings=30,
    vocab_size=100,
)


@pytest.mark.parametrize(
    ("config", "ranks", "flags"),
    [
        (CONFIG, 1, []),
        (CONFIG, 6, []),
        (CONFIG, 4, ["--seq-length 30"]),
        (CONFIG, 5, ["--num-attention-heads 12"]),
        (CONFIG.replaced(num_query_groups=3), 3, []),
        (CONFIG.replaced(num_query_groups=3), 6, ["--num-query-groups 3"]),
        (
            CONFIG.replaced(num_query_groups=2, ffn_hidden_size=90),
            4,
            ["--num-query-groups 2", "--ffn-hidden-size 90", "--seq-length 30"],
        ),
    ],
)
def test_every_uneven_cut_is_told(config: ModelSettings, ranks: int, flags: list[str]) -> None:
    messages = list(faults_of_cut(config, ranks, sequence_parallel=True))
    expected = [f"--tensor-model-parallel-size {ranks} does not divide {flag}:" for flag in flags]
    assert [message.partition(":")[0] + ":" for message in messages] == expected


def test_the_sequence_is_whole_without_sequence_parallelism() -> None:
    assert not list(faults_of_cut(CONFIG, 4, sequence_parallel=False))

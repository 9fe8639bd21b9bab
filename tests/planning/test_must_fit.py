"""A model that cannot be in memory is refused by its flags; what a run might hold is not."""

from dataclasses import replace
from typing import Any

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.parallel.settings import PipelineRankSettings
from megatron.planning import must_fit
from megatron.planning.must_fit import check_memory
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig

JOB = Job(GPTOptions(num_layers=4, vocab_size=61), microbatches=4)


def check(config: RunConfig, rank: int = 0) -> None:
    check_memory(config, make_run_plan(config), rank)


def test_a_small_model_fits() -> None:
    config = JOB.config(Layout(2, "vocab-2"))
    check(config, 0)
    check(config, 1)


@pytest.mark.parametrize("width", ["hidden_size", "ffn_hidden_size", "kv_channels", "vocab_size"])
def test_a_width_beyond_all_memory_is_refused(width: str) -> None:
    config = JOB.config(Layout(2, "vocab-2"))
    changes: dict[str, Any] = {width: 10**12}
    wide = replace(config, model=config.model.replaced(**changes))
    if width == "vocab_size":
        wide = replace(wide, parallel=replace(wide.parallel, padded_vocab_size=10**12))
    flag = "--" + width.replace("_", "-")
    with pytest.raises(ValueError, match=rf"{flag} {10**12}.* of rank 1 take [\d,]+ GiB or more"):
        check(wide, 1)


def test_a_microbatch_beyond_all_memory_is_refused() -> None:
    config = JOB.config(Layout(2, "none"))
    changes: dict[str, Any] = {"seq_length": 10**13, "position_embedding_type": "none"}
    long = replace(config, model=config.model.replaced(**changes))
    with pytest.raises(ValueError, match=r"^--micro-batch-size 1 and --seq-length 10{13}: with on"):
        check(long)


def test_of_an_uneven_pipeline_the_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank has the large vocabulary's matrix, which is tied to nothing here."""
    config = JOB.config(Layout(2, "none"))
    model = config.model.replaced(vocab_size=10**6, tie_embeddings=False)
    parallel = replace(config.parallel, pipeline=PipelineRankSettings(3), padded_vocab_size=10**6)
    config = replace(config, model=model, parallel=parallel)
    monkeypatch.setattr(must_fit, "_memory", lambda _: 6 * 10**6 * model.hidden_size)
    check(config, 1)
    for rank in (0, 2):
        with pytest.raises(ValueError, match=f"of rank {rank} take"):
            check(config, rank)

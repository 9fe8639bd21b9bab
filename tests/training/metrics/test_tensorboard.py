"""Curves are read back from TensorBoard's files with its own reader."""

from pathlib import Path

import pytest
from training.metrics.made_records import evaluation, interval, started, step

from megatron.config.run_config import RecordConfig
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.tensorboard import TensorBoard


def test_curves_over_iterations_and_samples(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    config = RecordConfig(log_timers_to_tensorboard=True, log_validation_ppl_to_tensorboard=True)
    sink = TensorBoard(tmp_path, 10, Curves(config, 2))
    for record in (started(), step(1), step(2), interval(2), evaluation(2)):
        sink.write(record)
    sink.close(failed=False)
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    losses = [(point.step, round(point.value, 5)) for point in found.Scalars("lm loss")]
    assert losses == [(1, 9.9), (2, 9.8)]
    over_samples = [point.step for point in found.Scalars("lm loss vs samples")]
    assert over_samples == [8, 16]
    tags = set(found.Tags()["scalars"])
    assert tags >= {"learning-rate vs samples", "iteration-time", "lm loss validation ppl"}
    assert "iteration-time vs samples" not in tags
    [text] = found.Tensors("configuration/text_summary")
    assert b'"vocab_size": 61' in text.tensor_proto.string_val[0]

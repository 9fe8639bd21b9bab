"""Curves are read back from TensorBoard's files with its own reader."""

import importlib
import sys
from pathlib import Path

import pytest
from training.metrics.made_records import evaluation, generated, interval, started, step

from megatron.run.records import RecordSettings
from megatron.training.metrics import tensorboard
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.records import LayerFigures
from megatron.training.metrics.tensorboard import TensorBoard

FAKE = """
writers = []

class SummaryWriter:
    def __init__(self, logdir, max_queue):
        self.folder, self.queue, self.points, self.closed = logdir, max_queue, [], False
        writers.append(self)

    def add_scalar(self, tag, scalar_value, global_step):
        self.points.append((tag, scalar_value, global_step))

    def add_histogram_raw(self, tag, **values):
        self.points.append((tag, values["bucket_counts"], values["global_step"]))

    def add_text(self, tag, text_string, global_step):
        self.points.append((tag, text_string, global_step))

    def close(self):
        self.closed = True
"""


def test_curves_over_iterations_and_samples(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    config = RecordSettings(log_timers_to_tensorboard=True, log_validation_ppl_to_tensorboard=True)
    sink = TensorBoard(tmp_path, 10, Curves(config, 2))
    layer = LayerFigures(3, {}, 1.5, 2, (1, 0, 3))
    for record in (started(), step(1), step(2, layers=(layer,)), interval(2), evaluation(2)):
        sink.write(record)
    sink.write(generated(2))
    sink.close(failed=False)
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    losses = [(point.step, round(point.value, 5)) for point in found.Scalars("lm loss")]
    assert losses == [(1, 9.9), (2, 9.8)]
    over_samples = [point.step for point in found.Scalars("lm loss vs samples")]
    assert over_samples == [8, 16]
    tags = set(found.Tags()["scalars"])
    assert tags >= {"learning-rate vs samples", "iteration-time", "lm loss validation ppl"}
    assert "iteration-time vs samples" not in tags
    [chart] = found.Histograms("moe/expert-load_layer_3")
    drawn = chart.histogram_value
    assert (chart.step, drawn.num, drawn.sum, drawn.sum_squares) == (2, 4, 6, 12)
    bars = dict(zip(drawn.bucket_limit, drawn.bucket, strict=True))
    assert [bars.get(expert + 0.5, 0) for expert in range(3)] == [1, 0, 3]
    [text] = found.Tensors("configuration/text_summary")
    assert b'"vocab_size": 61' in text.tensor_proto.string_val[0]
    [text] = found.Tensors("text 1/text_summary")
    assert text.step == 2
    shown = b"    Once\n    upon\n\n---\n\n     a `time`"  # blocks of code, and a rule between
    assert text.tensor_proto.string_val[0] == shown


def test_the_other_package_gets_names_without_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would complain of every point. A package stands in for it that notes its calls."""
    package = tmp_path / "packages" / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(tensorboard, "is_installed", lambda name: name == "tensorboardX")
    sink = TensorBoard(tmp_path / "curves", 10, Curves(RecordSettings(), 2))
    layer = LayerFigures(3, {}, 1.5, 2, (1, 0, 3))
    for record in (started(), step(1, layers=(layer,)), generated(1)):
        sink.write(record)
    sink.close(failed=False)
    made = importlib.import_module("tensorboardX").writers[0]
    assert (made.folder, made.queue, made.closed) == (str(tmp_path / "curves"), 10, True)
    assert ("lm_loss", 9.9, 1) in made.points
    assert ("moe/expert-load_layer_3", [1, 0, 3], 1) in made.points
    assert ("lm_loss_vs_samples", 9.9, 8) in made.points
    assert ("text_2", "    mice\u200b", 1) in made.points
    assert not [tag for tag, *_ in made.points if " " in tag]
    monkeypatch.delitem(sys.modules, "tensorboardX")

"""tools/host_time.py: all layers run, and compute the same where programs compute anything."""

import pytest
import torch

from megatron.kernels.cuda.row_operators import norms
from megatron.kernels.reference.kernels import ReferenceKernels
from tools import host_time
from tools.benchmarking.plain_model import Layer


def test_every_pass_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    host_time.main(["--rounds", "3"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "    python tools/host_time.py --rounds 3"
    _, _, *rows = (line for line in printed if line.startswith("|"))
    names = [row.split("|")[1].strip() for row in rows]
    assert names[0] == "plain"
    assert names[1:] == [
        f"{kernels}, {way}"
        for kernels in ("reference", "GPU's operators", "replayed")
        for way in ("whole", "split")
    ]
    for row in rows[:-2]:  # a replay takes less than the table shows
        forward, backward, weights, whole = map(int, row.split("|")[2:6])
        assert min(forward, backward, whole) > 0
        assert (weights > 0) == ("split" in row)


def test_a_program_that_was_launched_before_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has written what it would read, so its result may be an error."""

    class Program:
        def __getitem__(self, grid: object) -> object:
            raise AssertionError("a program is launched")

    monkeypatch.setitem(vars(norms), "norm_backward", Program())
    host_time.measure(1)


@pytest.mark.parametrize("splits", [False, True])
def test_our_layer_is_the_one_that_it_is_compared_with(splits: bool) -> None:
    ours = host_time.ours("ours", ReferenceKernels(), splits=splits)
    plain, own = Layer(host_time.MODEL), ours.layers[0]
    torch.manual_seed(0)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter)
    plain.load_state_dict(dict(own.named_parameters()))
    x_bsh = torch.randn(2, host_time.TOKENS, host_time.HIDDEN)
    torch.testing.assert_close(own(x_bsh), plain(x_bsh), rtol=1e-4, atol=1e-5)

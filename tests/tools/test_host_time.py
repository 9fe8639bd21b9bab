"""tools/host_time.py: all layers run, and compute the same where programs compute anything."""

import pytest
import torch

from megatron.kernels.reference.kernels import ReferenceKernels
from tools import host_time


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


@pytest.mark.parametrize("splits", [False, True])
def test_our_layer_is_the_one_that_it_is_compared_with(splits: bool) -> None:
    """With the same weights; PyTorch's heads lie one kind after the other, ours by groups."""
    ours = host_time.ours("ours", ReferenceKernels(), splits=splits)
    plain, own = host_time.PlainLayer(), ours.layers[0]
    weights = dict(own.named_parameters())
    torch.manual_seed(0)
    for parameter in weights.values():
        torch.nn.init.normal_(parameter)
    size = host_time.HIDDEN // host_time.HEADS

    def by_kind(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.detach().view(host_time.HEADS, 3, size, *rows.shape[1:])
        return groups.transpose(0, 1).reshape(rows.shape)

    pairs = {
        "first_norm": "input_layernorm",
        "qkv": "self_attention.linear_qkv",
        "projection": "self_attention.linear_proj",
        "second_norm": "pre_mlp_layernorm",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    }
    with torch.no_grad():
        for theirs, name in pairs.items():
            for kind in ("weight", "bias"):
                value = weights[f"{name}.{kind}"]
                target = getattr(getattr(plain, theirs), kind)
                target.copy_(by_kind(value) if theirs == "qkv" else value)
    x_bsh = torch.randn(2, host_time.TOKENS, host_time.HIDDEN)
    torch.testing.assert_close(own(x_bsh), plain(x_bsh), rtol=1e-4, atol=1e-5)

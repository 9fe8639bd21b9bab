"""Embedding and head of any kind give the loss of their microbatches."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.library.own_stages import OwnStages, WholeVocabulary
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.store import ActivationStore
from megatron.schedules.make_plan import make_plan

MICROBATCHES, SAMPLES, SEQUENCE, H, V = 3, 2, 5, 4, 7


def test_the_loss_is_the_sum_of_those_of_the_microbatches() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(MICROBATCHES, SAMPLES * SEQUENCE, H, generator=generator)
    labels = torch.randint(V, (MICROBATCHES, SAMPLES * SEQUENCE), generator=generator)
    weight = torch.randn(V, H, generator=generator)

    def head(x_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        return functional.cross_entropy((x_bsh @ weight.T).flatten(0, 1), labels_bs.flatten())

    store, embedding = ActivationStore(), nn.Embedding(V, H)
    plan = make_plan("1f1b", "none", 1, MICROBATCHES)
    passes = WholeVocabulary(OwnStages([nn.Identity()]), plan, 0, store, embedding, head)
    ones = torch.ones(SAMPLES * SEQUENCE)
    batch = [DeviceMicrobatch(own, own, ones, SAMPLES, float("nan")) for own in labels]
    passes.begin(batch, training=True, predicts_ahead=False)
    for i, x_nh in enumerate(outputs):
        store.put("x", i, x_nh.clone())
        passes.output_whole(i)
    expected = sum(
        functional.cross_entropy(x_nh @ weight.T, own)
        for x_nh, own in zip(outputs, labels, strict=True)
    )
    torch.testing.assert_close(passes.loss(torch.device("cpu")), torch.as_tensor([expected]))

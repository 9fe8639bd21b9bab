"""The plain loss and its training obey the identities that define them."""

import dataclasses
import math

import pytest
import torch
from reference.plain_gpt import GPTOptions, logits, random_parameters
from reference.plain_loss import RandomMicrobatch, loss_and_gradients
from reference.plain_training import AdamWOptions, train

OPTIONS = GPTOptions(num_layers=1)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def draw(batch: int = 2, seed: int = 0, masked_out: bool = False) -> RandomMicrobatch:
    return RandomMicrobatch.draw(OPTIONS.vocab_size, batch, 7, seed, masked_out)


def masked_mean(values_bs: torch.Tensor, microbatch: RandomMicrobatch) -> float:
    return float((values_bs * microbatch.loss_mask).sum() / microbatch.loss_mask.sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_is_the_masked_mean_of_its_written_definition(smoothing: float, z_loss: float) -> None:
    options = dataclasses.replace(OPTIONS, label_smoothing=smoothing, z_loss_coeff=z_loss)
    parameters, microbatch = random_parameters(options), draw()
    logits_bsv = logits(parameters, microbatch.tokens, options)
    log_z_bs = logits_bsv.exp().sum(dim=-1).log()
    target_bs = logits_bsv.gather(-1, microbatch.labels[..., None]).squeeze(-1)
    smoothed_bs = (1 - smoothing) * target_bs + smoothing * logits_bsv.mean(dim=-1)
    expected = masked_mean(log_z_bs - smoothed_bs + z_loss * log_z_bs**2, microbatch)

    loss, _ = loss_and_gradients(parameters, [microbatch], options)

    assert 0 < microbatch.loss_mask.mean() < 1
    assert loss == pytest.approx(expected, rel=1e-12)


def test_gradients_are_the_slopes_of_the_loss() -> None:
    options = dataclasses.replace(
        OPTIONS, label_smoothing=0.1, z_loss_coeff=0.01, logit_softcap=2.0
    )
    parameters, microbatches = random_parameters(options), [draw(), draw(1, seed=1)]
    directions = random_parameters(options, seed=1)
    _, gradients = loss_and_gradients(parameters, microbatches, options)

    for name in parameters:
        step = 1e-5 * directions[name]
        above, below = (
            loss_and_gradients({**parameters, name: moved}, microbatches, options)[0]
            for moved in (parameters[name] + step, parameters[name] - step)
        )
        slope = float((gradients[name] * step).sum())
        assert (above - below) / 2 == pytest.approx(slope, rel=1e-5, abs=1e-12), name


def test_division_into_microbatches_decides_nothing() -> None:
    parameters, parts = random_parameters(OPTIONS), [draw(3), draw(1, seed=1), draw(2, seed=2)]
    whole = RandomMicrobatch(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.loss_mask for part in parts]),
    )

    loss, gradients = loss_and_gradients(parameters, parts, OPTIONS)
    expected_loss, expected_gradients = loss_and_gradients(parameters, [whole], OPTIONS)

    assert loss == pytest.approx(expected_loss, rel=1e-13)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-15)


def test_masked_out_microbatch_contributes_nothing() -> None:
    parameters, microbatch = random_parameters(OPTIONS), draw()

    alone = loss_and_gradients(parameters, [microbatch], OPTIONS)
    together = loss_and_gradients(parameters, [draw(seed=1, masked_out=True), microbatch], OPTIONS)

    assert together[0] == alone[0]
    torch.testing.assert_close(together[1], alone[1], rtol=0, atol=0)
    with pytest.raises(ValueError, match="every loss of the global batch is masked out"):
        loss_and_gradients(parameters, [draw(masked_out=True)], OPTIONS)


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    untied = dataclasses.replace(OPTIONS, tie_embeddings=False)
    parameters, microbatch = random_parameters(OPTIONS), draw()
    _, tied_gradients = loss_and_gradients(parameters, [microbatch], OPTIONS)

    copies = {**parameters, OUTPUT: parameters[EMBEDDING]}
    _, gradients = loss_and_gradients(copies, [microbatch], untied)

    torch.testing.assert_close(tied_gradients[EMBEDDING], gradients[EMBEDDING] + gradients[OUTPUT])


def test_first_update_follows_the_formula_of_adamw() -> None:
    # In the first step both bias-corrected moments are the (clipped) gradient and its square.
    parameters, microbatch = random_parameters(OPTIONS), draw()
    adamw = AdamWOptions(weight_decay=0.3, adam_eps=0.1, clip_grad=0.05)
    lr = 0.02

    run = train(parameters, [[microbatch]], [lr], OPTIONS, adamw)

    loss, gradients = loss_and_gradients(parameters, [microbatch], OPTIONS)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm > adamw.clip_grad
    assert run.losses == [loss]
    assert run.gradient_norms == [pytest.approx(norm, rel=1e-12)]
    torch.testing.assert_close(run.first_gradients, gradients, rtol=0, atol=0)
    for name, value in parameters.items():
        clipped = gradients[name] * adamw.clip_grad / (norm + 1e-6)
        decay = adamw.weight_decay if value.dim() == 2 else 0.0
        step = clipped / (clipped.abs() + adamw.adam_eps) + decay * value
        torch.testing.assert_close(run.parameters[name], value - lr * step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_learns_a_repeated_batch_and_leaves_its_input_alone(dtype: torch.dtype) -> None:
    parameters = random_parameters(OPTIONS, dtype=dtype)
    before = {name: value.clone() for name, value in parameters.items()}
    batches = [[draw(), draw(seed=1)]] * 20

    run = train(parameters, batches, [0.01] * 20, OPTIONS, AdamWOptions())

    assert run.losses[-1] < run.losses[0] - 1
    assert {value.dtype for value in run.parameters.values()} == {dtype}
    torch.testing.assert_close(parameters, before, rtol=0, atol=0)


def test_clipping_far_from_its_limit_or_switched_off_does_nothing() -> None:
    parameters, batches = random_parameters(OPTIONS), [[draw()], [draw(seed=1)]]

    off, far = (
        train(parameters, batches, [0.01] * 2, OPTIONS, AdamWOptions(clip_grad=limit))
        for limit in (0.0, 1e9)
    )

    torch.testing.assert_close(off.parameters, far.parameters, rtol=0, atol=0)

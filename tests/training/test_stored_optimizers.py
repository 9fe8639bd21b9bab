"""An optimizer's values in an earlier checkpoint are those of today, under other names."""

from dataclasses import asdict, replace

from megatron.optimizer.settings import LossScaleSettings, MuonSettings, OptimizerSettings
from megatron.training.checkpoint_reading import renewed_optimizer

EARLIER = {
    "lr": 0.001,
    "lr_warmup_samples": 12.5,
    "optimizer": "muon",
    "post_validation": True,
    "muon": {
        "momentum": 0.9,
        "nesterov": True,
        "num_ns_steps": 5,
        "coefficient_type": "quintic",
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
        "fp32_matmul_prec": "high",
        "split_qkv": False,
    },
    "loss_scale": {
        "constant": None,
        "initial": 65536.0,
        "minimum": 2.0,
        "window": 500,
        "hysteresis": 3,
    },
    "exp_avg_dtype": "bf16",
}
"""As a checkpoint of November 2026 has them; the values that are left out have their defaults."""

TODAY = OptimizerSettings(
    lr=0.001,
    lr_warmup_samples=12.5,
    optimizer="muon",
    post_validation=True,
    muon=MuonSettings(
        muon_momentum=0.9, muon_nesterov=True, muon_fp32_matmul_prec="high", muon_split_qkv=False
    ),
    loss_scale=LossScaleSettings(
        initial_loss_scale=65536.0, min_loss_scale=2.0, loss_scale_window=500, hysteresis=3
    ),
    exp_avg_dtype="bf16",
)


def test_values_of_an_earlier_checkpoint_are_those_of_today() -> None:
    found, today = renewed_optimizer(EARLIER), asdict(TODAY)
    assert found == {name: today[name] for name in EARLIER}
    other = asdict(replace(TODAY, muon=MuonSettings()))
    assert found["muon"] != other["muon"]
    assert found["muon"].keys() == other["muon"].keys()


def test_values_of_today_stay_as_they_are() -> None:
    plain = asdict(OptimizerSettings(lr=1.0))
    for stored in (asdict(TODAY), plain):
        assert renewed_optimizer(stored) == stored

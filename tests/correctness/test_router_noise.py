"""Random numbers of routers do not depend on the layout, nor do figures of further tokens' layers.

The plain mixture draws no such numbers. So layouts are compared with one process.
"""

from dataclasses import replace
from typing import Any, Final

import pytest
from correctness.agreement import errors
from correctness.rank_runs import RankRun, assemble, check_agreement, train_on_rank
from correctness.short_runs import Job, Layout
from correctness.test_experts import DEEPSEEK, PARTS
from harness.marks import full
from harness.rank_pool import RankPool

JOB = Job(
    replace(DEEPSEEK, mtp_num_layers=1, moe_z_loss_coeff=0.05),
    micro_batch_size=2,
    microbatches=2,
    iterations=3,
    warmup=1,
    sequence=12,
)
NOISE: Final[dict[str, dict[str, Any]]] = {
    "jitter": {"moe_input_jitter_eps": 0.5},
    "forced": {"moe_router_force_load_balancing": True},
}
SHARED = Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True, recomputation=PARTS)


@pytest.mark.parametrize(
    ("noise", "layout"),
    [
        ("jitter", SHARED),
        full("forced", SHARED),
        full("forced", Layout(1, "none", replicas=2)),
    ],
    ids=str,
)
def test_layouts_draw_the_same_numbers(noise: str, layout: Layout, ranks: RankPool) -> None:
    def run(layout: Layout, **fields: Any) -> list[RankRun]:
        config = JOB.config(layout)
        config = replace(config, model=config.model.replaced(**fields))
        runs: list[RankRun] = ranks.run(
            train_on_rank, layout.world_size, config=config, batches=JOB.batches()
        )
        check_agreement(runs)
        return runs

    [alone], [plain] = run(Layout(1, "none"), **NOISE[noise]), run(Layout(1, "none"))
    runs = run(layout, **NOISE[noise])
    assert runs[0].losses == pytest.approx(alone.losses, rel=1e-5)
    assert runs[0].depth_losses == [pytest.approx(own, rel=1e-5) for own in alone.depth_losses]
    assert runs[0].imbalances == alone.imbalances
    for found, wanted in zip(runs[0].layer_losses, alone.layer_losses, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    gradients = [assemble([own.first_gradients for own in each]) for each in (runs, [alone])]
    assert max(errors(gradients[0], gradients[1]).values()) < 1e-5
    assert alone.gradient_norms != pytest.approx(plain.gradient_norms, rel=1e-3), "it is at work"
    names = [name for own in runs for name in own.buffers]
    assert any(name.startswith("mtp.") for name in names)

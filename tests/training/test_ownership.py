"""The ranks of a replica hold every element of every parameter once, in every layout."""

import torch
from correctness.short_runs import Job, Layout
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_gpt import GPTOptions, parameter_shapes

from megatron.parallel.box import Box, check_tiling
from megatron.parallel.grid import Grid
from megatron.parallel.groups import connect_grid
from megatron.planning.run_plan import make_run_plan
from megatron.schedules.catalogue import TRAINABLE_SCHEDULES, TRAITS
from megatron.schedules.treatments import TREATMENTS
from megatron.training.setup import make_model

CPU = torch.device("cpu")
SCHEDULES = [s for s in TRAINABLE_SCHEDULES if s != "file" and not TRAITS[s].needs_memory_limit]


@settings(max_examples=examples(25), deadline=None)
@given(
    ranks=st.integers(1, 4),
    replicas=st.integers(1, 3),
    tensor=st.sampled_from([(1, False), (2, False), (2, True), (4, True)]),
    schedule=st.sampled_from(SCHEDULES),
    treatment=st.sampled_from(sorted(TREATMENTS)),
    tied=st.booleans(),
    gated=st.booleans(),
    vocab_size=st.integers(2, 40),
)
def test_the_boxes_of_a_replica_tile_every_tensor(
    ranks: int,
    replicas: int,
    tensor: tuple[int, bool],
    schedule: str,
    treatment: str,
    tied: bool,
    gated: bool,
    vocab_size: int,
) -> None:
    options = GPTOptions(
        num_layers=2 * ranks, vocab_size=vocab_size, tie_embeddings=tied, swiglu=gated
    )
    size, sequence = tensor
    layout = Layout(ranks, treatment, schedule, tensor=size, sequence=sequence)
    config = Job(options, sequence=12).config(layout)
    run_plan = make_run_plan(config)
    grid = Grid(size, replicas, ranks)
    shapes = parameter_shapes(options)
    boxes: dict[tuple[int, str], list[Box]] = {}
    for rank in range(grid.world_size):
        groups = connect_grid(grid, rank, CPU, (0, 0), lambda use, tiling: None)
        model = make_model(config, groups, run_plan)
        for own in model.owned_parameters():
            assert own.global_shape == shapes[own.name]
            if not own.is_copy:
                found = boxes.setdefault((groups.data.rank, own.name), [])
                found += [piece.box for piece in own.pieces]
    assert boxes.keys() == {(replica, name) for replica in range(replicas) for name in shapes}
    for (_, name), found in boxes.items():
        check_tiling(shapes[name], found)

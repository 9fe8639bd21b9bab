"""Memory of messages between stages that PyTorch keeps after a rank has dropped them.

PyTorch notes the stream of a point-to-point transfer in the memory of the message. When the rank
drops the message, PyTorch keeps the memory until that stream has come to the end of all transfers
that it had been given by then. The host issues an iteration ahead of the GPU, so the memory of any
number of messages may be waiting: eight messages in a row kept the memory of eight on an H200
(docs/benchmarks/2026-11-26-h200). ``torch.cuda.max_memory_allocated`` does not show this memory;
``max_memory_reserved`` does. PyTorch waits for it before an allocation fails, so it decides nothing
about whether a plan fits.
"""

from megatron.run.run_config import RunConfig
from megatron.schedules.lower import Program, Start
from megatron.schedules.needs import STAGE_KINDS, Comm


def kept_messages(config: RunConfig, program: Program) -> list[float]:
    """Return for every pipeline rank the most bytes of messages that PyTorch may keep.

    These are all messages that the rank sends and receives in an iteration.

    Args:
        config: the run.
        program: of an iteration.
    """
    parallel, train, model = config.parallel, config.train, config.model
    parts = parallel.context.size
    if parallel.tensor.sequence_parallel:
        parts *= parallel.tensor.size
    tokens = train.micro_batch_size * model.seq_length
    narrow, wide = train.dtype.itemsize, 4 if train.wide_stream else train.dtype.itemsize
    of_byte, plan = tokens * model.hidden_size / parts / program.plan.slices, program.plan

    def size(comm: Comm) -> float:
        if plan.hands_on_predictions(comm.stage - (comm.kind == "G")):
            return of_byte * narrow * (1 + model.further.mtp_num_layers)
        return of_byte * wide

    return [
        sum(
            size(step.comm)
            for step in row
            if isinstance(step, Start) and step.comm.kind in STAGE_KINDS
        )
        for row in program.rows
    ]

"""The least memory that a run takes, whatever its plan: known before any plan is searched.

Before the last stage can begin the backward of the first microbatch, every rank has run its
forwards of that microbatch and, where the vocabulary is split, its S. So there is a moment at which
a rank holds parameters, gradients and optimizer state, all tensors that one microbatch leaves on
the rank, and the microbatch's part of the input embedding (a program keeps the last embedding,
``lower``). A plan of a single microbatch holds no more, with one exception: the gradient of the
embeddings, if that gradient arrives while T runs.
"""

from dataclasses import replace

from megatron.config.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import one_microbatch_of
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.rank_memory import peaks
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.count.run import count_ranks
from megatron.training.planning.forecast_run import Fullest
from megatron.training.planning.run_memory import run_memory


def least_memory(config: RunConfig, candidate: Candidate) -> Fullest:
    """Return the least memory of the fullest rank under every plan of a schedule.

    No plan is searched. A schedule that is read from a file has that plan alone.

    Args:
        config: the run.
        candidate: the schedule; it has a plan in a file, a block, or one chunk per rank and a split
            backward.
    """
    if candidate.request.file is not None:
        plan = candidate.run_plan.plan
        one = plan_of_one(plan)
    else:
        looks_ahead = config.model.mtp_num_layers > 0
        one = plan = replace(one_microbatch_of(candidate.request), looks_ahead=looks_ahead)
    memories = run_memory(config, plan, count_ranks(config, one, candidate.layers))
    return Fullest.of(peaks(lower(plan, candidate.request.costs), memories), memories)

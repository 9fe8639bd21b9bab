"""The least memory that a run takes, whatever its plan: known before any plan is searched.

Before the last stage can begin the backward of the first microbatch, every rank has run its
forwards of that microbatch and, where the vocabulary is split, its S. So there is a moment at which
a rank holds parameters, gradients and optimizer state, all tensors that one microbatch leaves on
the rank, and the microbatch's part of the input embedding (a program keeps the last embedding,
``lower``). A plan of a single microbatch holds no more, with one exception: the gradient of the
embeddings, if that gradient arrives while T runs.
"""

from megatron.config.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import one_microbatch_of, plan_for
from megatron.schedules.plan import plan_of_one
from megatron.schedules.request import Request
from megatron.simulator.costs.rank_memory import peaks
from megatron.training.planning.count.run import count_ranks
from megatron.training.planning.forecast_run import Fullest
from megatron.training.planning.planned_run import RunPlan
from megatron.training.planning.run_memory import run_memory


def least_memory(config: RunConfig, request: Request, layers: tuple[int, ...]) -> Fullest:
    """Return the least memory of the fullest rank under every plan of a schedule.

    No plan is searched. A schedule that is read from a file has that plan alone.

    Args:
        config: the run.
        request: the request for its plan; the schedule has a plan in a file, a block, or one chunk
            per rank and a split backward.
        layers: transformer layers of every stage.
    """
    found = one_microbatch_of(request) if request.file is None else plan_for(request)
    plan = RunPlan.of(config, request, layers, found).plan
    memories = run_memory(config, plan, count_ranks(config, plan_of_one(plan), layers))
    return Fullest.of(peaks(lower(plan, request.costs), memories), memories)

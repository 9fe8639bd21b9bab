"""A case of the explorer's page: a schedule, its size and its costs, as JSON values.

A case becomes the same ``Scenario`` that ``tools/simulate.py`` makes of its flags, and ``command``
returns these flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from megatron.commands.exploring.model_costs import ModelCosts, ModelJob
from megatron.commands.exploring.replica_job import ReplicaJob
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.costs import Costs, Time
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.schedules.plan_file import load_any_plan, treatments_of
from megatron.schedules.request import Request
from megatron.simulator.costs.cost_file import parse_costs, parse_waits
from megatron.simulator.scenario import Scenario

SHOWN_SCHEDULES: Final = (*SCHEDULES, "zb-auto", "auto")
"""The schedules that the page offers: the standard library is enough to plan them."""

MOST_PASSES: Final = 250_000
"""Passes of the largest plan that is shown; a page cannot draw more in a moment."""


@dataclass(frozen=True)
class Case:
    """A case that the page shows.

    Attributes:
        schedule: of ``SHOWN_SCHEDULES``.
        vocab: treatment of the vocabulary.
        p: pipeline ranks.
        m: microbatches.
        v: chunks of a rank; ``None``: as the schedule has them.
        n: slices of a microbatch; ``None``: microbatches are whole.
        limit: microbatches that a rank may hold; ``None``: none is given.
        split: make W a pass of its own.
        ahead: chunks that may be computed again before their B; ``None``: within B.
        joined: join each F with a B near it into a pair, where the plan does not become longer.
        searched: fill idle time; if not, passes stay in the order of the block.
        seconds: time to look for the plan; ``None``: as long as it takes.
        costs: ``F=1,B=1,...``, of all chunks of a rank together, so that all schedules do the same
            work.
        waits: ``F=0.5,...``, the parts of the times in ``costs`` in which passes wait for an
            exchange of tokens; pairs hide them. Empty: passes wait for nothing.
        output: time of the forward of the whole output layer; ``None``: S and T are in ``costs``.
        again: the output layer's backward computes the logits once more.
        model: a model and a GPU, from which the costs follow in place of ``costs``.
        replicas: of the pipeline. Without a model ``costs`` have the time of RG, and perhaps of AG
            and U; ``None``: there is one pipeline.
        plan: a plan in text form in place of that of the schedule.

    Raises:
        ValueError: if it is too large to be shown, a time is given twice or not at all, or ``auto``
            is to take the costs of a model, or a dense model is to have pairs or waits.
    """

    schedule: str = "1f1b"
    vocab: str = "vocab-2"
    p: int = 4
    m: int = 8
    v: int | None = None
    n: int | None = None
    limit: float | None = None
    split: bool = False
    ahead: int | None = None
    joined: bool = False
    searched: bool = True
    seconds: float | None = None
    costs: str = "F=1,B=1,W=1"
    waits: str = ""
    output: float | None = None
    again: bool = False
    model: ModelJob | None = None
    replicas: ReplicaJob | None = None
    plan: str | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SHOWN_SCHEDULES:
            raise ValueError(
                f"schedule {self.schedule}: the page shows {', '.join(SHOWN_SCHEDULES)}"
            )
        chunks = self.v or TRAITS[self.schedule].chunks
        cut = "" if self.n is None else f", n = {self.n}"
        if (passes := 5 * self.p * self.m * chunks * (self.n or 1)) > MOST_PASSES:
            raise ValueError(
                f"p = {self.p}, m = {self.m}{cut} and {chunks} chunks make about {passes:,} "
                f"passes, more than the {MOST_PASSES:,} that a page can show: take fewer, or "
                "tools/simulate.py"
            )
        if TRAITS[self.schedule].compares and self.model is not None and self.plan is None:
            raise ValueError(
                f"{self.schedule} needs costs that hold for all schedules, and those of a model "
                "follow from the places of its stages: take costs by hand, or choose from the "
                "comparison of all schedules, which counts each with its own"
            )
        self._refuse_costs()

    def _refuse_costs(self) -> None:
        if (self.joined or self.waits) and self.model is not None:
            raise ValueError(
                "pairs hide the exchange of tokens with experts on other ranks, and the models "
                "here are dense: take costs by hand, with the time that passes wait"
            )
        if self.output is not None and self.output < 0:
            raise ValueError(f"the output layer takes {self.output:g}: give a time, 0 or more")
        given = self.model is None and self.output is not None and parse_costs(self.costs).passes
        if given and (given["S"] or given["T"]):
            raise ValueError(
                f"the output layer's {self.output:g} and the costs of S and T both give its time: "
                "give only one of them"
            )
        if self.again and self.model is None and self.output is None:
            raise ValueError("computing logits again adds to the output layer's time: give that")
        if self.replicas is not None and self.model is None:
            costs = parse_costs(self.costs)
            if "RG" not in {*costs.comms, *costs.exchanges}:
                raise ValueError(
                    f"{self.replicas.count} replicas reduce their gradients: give the time of RG, "
                    "of all buckets of a rank together, or a model"
                )

    @classmethod
    def of_json(cls, values: object) -> "Case":
        """Return the case that JSON values describe; what is absent is as usual.

        Raises:
            ValueError: for an unknown name, or a value that is none; the message names it.
        """
        known = _checked(cls, values, "a case")
        if known.get("model") is not None:
            known["model"] = ModelJob(**_checked(ModelJob, known["model"], "a model"))
        if known.get("replicas") is not None:
            given = _checked(ReplicaJob, known["replicas"], "'replicas'")
            known["replicas"] = ReplicaJob(**given)
        return cls(**known)

    def scenario(self, folder: Path) -> Scenario:
        """Return what to simulate.

        Args:
            folder: where the text of a plan is kept meanwhile, because plans come from files.

        Raises:
            ValueError: the case asks for no plan, or the text holds none that can be run.
        """
        request = self._request(folder)
        own = self.replicas
        scenario = Scenario(
            request,
            replicas=1 if own is None else own.count,
            buckets=None if own is None else own.even_buckets,
        )
        if self.model is not None:
            return replace(scenario, request=replace(request, costs=self.derived(request).costs))
        return replace(
            scenario,
            request=replace(request, costs=self.chunk_costs(request)),
            output_layer=self.output,
            vocab_recompute=self.again,
        )

    def derived(self, request: Request) -> ModelCosts:
        """Return the costs and memory of the model on the stages of a plan."""
        assert self.model is not None
        return self.model.costs_of(request, self.replicas)

    def chunk_costs(self, request: Request) -> Costs:
        """Return the costs by hand of one chunk of a plan."""
        if request.file is None:
            chunks = request.chunks or request.traits.chunks
        else:
            chunks = load_any_plan(request.file).chunks
        waits = parse_waits(self.waits) if self.waits else {}
        return replace(parse_costs(self.costs), waits=waits).per_chunk(chunks)

    def compared(self, schedule: str) -> "Case":
        """Return a case of another schedule with its usual options, for a comparison of equal work.

        What is asked of one schedule is left out; a memory limit stays where it is needed.
        """
        needs_limit = TRAITS[schedule].needs_memory_limit
        return replace(
            self, schedule=schedule, v=None, split=False, plan=None, searched=True,
            limit=self.limit if needs_limit else None,
        )  # fmt: skip

    def _request(self, folder: Path) -> Request:
        if self.plan is None:
            return Request(
                self.schedule,
                self.vocab,
                self.p,
                self.m,
                slices=1 if self.n is None else self.n,
                chunks=self.v,
                memory_limit=self.limit,
                split_backward=self.split,
                recompute_ahead=self.ahead,
                shortened=self.searched,
                joined=self.joined,
            )
        file = folder / "my.plan"
        file.write_text(self.plan, encoding="utf-8")
        plan = load_any_plan(file)
        named = treatments_of(plan)
        vocabulary = self.vocab if self.vocab in named else named[0]
        return Request(
            "file", vocabulary, plan.ranks, plan.microbatches, slices=plan.slices, file=file
        )


def command(case: Case, request: Request) -> list[str]:
    """Return the command line that simulates a case in a checkout.

    A plan that was edited is in ``my.plan`` there, and costs of a model in ``costs.json``; the page
    offers both files.

    Args:
        case: what is shown; the command searches for its plan as long as it takes.
        request: of the case.
    """
    words = ["python", "tools/simulate.py", "--vocab-parallel", request.vocabulary]
    if case.plan is None:
        words += ["--pipeline-schedule", case.schedule, "-p", str(case.p), "-m", str(case.m)]
        for flag, value in (
            ("-v", case.v),
            ("--num-seq-splits", case.n),
            ("--zero-bubble-max-pending-backward", case.limit),
            ("--recompute-ahead", case.ahead),
        ):
            words += [] if value is None else [flag, repr(value)]
        words += ["--split-backward"] if case.split else []
        words += ["--overlap-moe-expert-parallel-comm"] if case.joined else []
    else:
        words += ["--schedule-file", "my.plan"]
    words += [] if case.replicas is None else case.replicas.flags
    if case.model is not None:
        return [*words, "--measured-costs", "costs.json"]
    costs = case.chunk_costs(request)
    words += ["--cost", costs_in_words(costs)]
    words += ["--waits", _in_words(costs.waits)] if costs.waits else []
    words += [] if case.output is None else ["--output-layer", repr(case.output)]
    return [*words, "--vocab-recompute"] if case.again else words


def costs_in_words(costs: Costs) -> str:
    """Return the text from which ``parse_costs`` reads these costs, none of them by chunk."""
    words = [_in_words({k: t for k, t in costs.passes.items() if k in CHUNKED_KINDS or t})]
    words += [f"{kind}={_times(time)}" for kind, time in costs.comms.items() if time]
    words += [f"{kind}={_times(own.times)}" for kind, own in costs.exchanges.items()]
    return ",".join(words)


def _in_words(times: Mapping[PassKind, Time]) -> str:
    return ",".join(f"{kind}={_times(time)}" for kind, time in times.items())


def _times(time: object) -> str:
    return ":".join(map(repr, time)) if isinstance(time, Sequence) else repr(time)


def _checked(kind: type, values: object, what: str) -> dict[str, Any]:
    """Return the fields of a dataclass that ``values`` give, each of the type of the field."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {str(values)[:40]}: give an object with names and values")
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"{what} has no '{name}': it has {', '.join(types)}")
        if not _fits(value, get_args(types[name]) or (types[name],)):
            raise ValueError(f"{name} is {str(value)[:40]!r}, which cannot be")
    return dict(values)


def _fits(value: object, kinds: Sequence[type]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, (int, float)) and not isfinite(value):
        return False
    if isinstance(value, Mapping):
        return any(map(is_dataclass, kinds))
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))

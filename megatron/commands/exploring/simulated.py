"""Run cases, and keep the last ones: a page asks several questions about the same case."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from megatron.commands.exploring.case import Case, command
from megatron.commands.exploring.model_costs import ModelCosts
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.rank_memory import peaks
from megatron.simulator.scenario import Scenario, Simulation, run

KEPT: Final = 16
"""Cases that are kept."""

WatchOf = Callable[[float | None], Watch]
"""Makes the watch of a search that may take so many seconds; ``None``: as long as it takes."""


@dataclass(frozen=True)
class Simulated:
    """A case with its simulation.

    Attributes:
        case: what was asked.
        scenario: what was simulated.
        done: the simulation.
        model: costs and sizes of the model, if the case has one.
        command: the command line that does the same.
        was_cut: the search for the plan was ended by its watch.
    """

    case: Case
    scenario: Scenario
    done: Simulation
    model: ModelCosts | None
    command: Sequence[str]
    was_cut: bool

    @property
    def held(self) -> list[float] | None:
        """The peak of every rank in bytes, if it is known."""
        return None if self.model is None else peaks(self.done.program, self.model.memories)


class Simulations:
    """Runs cases, and keeps the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Case, Simulated] = OrderedDict()

    def of(self, case: Case, watch_of: WatchOf = Watch) -> Simulated:
        """Return the simulation of a case.

        Args:
            case: what is asked.
            watch_of: makes the watch of its search.

        Raises:
            ValueError: the case asks for no plan, or for one that cannot be run.
        """
        found = self._kept.get(case)
        if found is None:
            found = _simulate(case, watch_of(case.seconds))
            self._kept[case] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found


def _simulate(case: Case, watch: Watch) -> Simulated:
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            scenario = case.scenario(folder)
            request = scenario.request
            done = run(scenario, watch)
            model = None if case.model is None else case.derived(request)
            words = command(case, request)
        except ValueError as error:
            raise ValueError(str(error).replace(f"{folder / 'my.plan'}", "the plan")) from error
    return Simulated(case, scenario, done, model, words, watch.was_cut)

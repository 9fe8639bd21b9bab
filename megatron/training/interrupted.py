"""The words of a run that Ctrl-C ends: the iterations that are lost, and how to lose none."""

from megatron.schedules.counted import counted


def lost_words(finished: int, saved: int, *, saves: bool) -> str:
    """Return a line on the loss of an interrupted run.

    Args:
        finished: iterations that are trained.
        saved: iterations of the last checkpoint; 0: there is none.
        saves: whether the run saves checkpoints.
    """
    since = f"since the checkpoint of iteration {saved}" if saved else "of this run"
    lost = finished - saved
    told = f"{counted(lost, 'iteration')} {since} {'is' if lost == 1 else 'are'} lost"
    where = "" if saves else ", and --save FOLDER"
    return (
        f"interrupted after iteration {finished}: {told if lost > 0 else 'nothing is lost'}; with "
        f"--exit-signal-handler --exit-signal SIGINT{where} Ctrl-C saves a checkpoint and leaves"
    )

"""What Ctrl-C costs is told, and how it costs nothing."""

import pytest

from megatron.training.interrupted import lost_words


@pytest.mark.parametrize(
    ("finished", "saved", "told"),
    [
        (12, 10, "2 iterations since the checkpoint of iteration 10 are lost"),
        (11, 10, "1 iteration since the checkpoint of iteration 10 is lost"),
        (10, 10, "nothing is lost"),
        (7, 0, "7 iterations of this run are lost"),
        (0, 0, "nothing is lost"),
    ],
)
def test_the_iterations_since_the_last_checkpoint_are_lost(
    finished: int, saved: int, told: str
) -> None:
    line = lost_words(finished, saved, saves=True)
    assert line.startswith(f"interrupted after iteration {finished}: {told}; with")
    assert "--exit-signal-handler --exit-signal SIGINT Ctrl-C saves" in line
    assert "and --save FOLDER" in lost_words(finished, saved, saves=False)

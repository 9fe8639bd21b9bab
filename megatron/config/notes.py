"""Notes for the log on flags of this project that change nothing, or not all, beside others."""

from collections.abc import Iterator

from megatron.config.flags import DataFlags, Flags


def notes(flags: Flags) -> Iterator[str]:
    """Yield a sentence on each such flag.

    Args:
        flags: without a mistake.
    """
    if flags.model.add_qkv_bias and not flags.model.disable_bias_linear:
        yield "--add-qkv-bias changes nothing: without --disable-bias-linear all layers have biases"
    if flags.data.mock_data:
        yield from _beside_mock_data(flags.data)


def _beside_mock_data(flags: DataFlags) -> Iterator[str]:
    if flags.split != DataFlags.split:
        yield (
            f"--split {flags.split} divides nothing: --mock-data has samples of its own for "
            "training, validation and test"
        )
    if flags.data_cache_path is not None:
        folder = flags.data_cache_path
        yield f"--data-cache-path {folder} changes nothing: --mock-data needs no indices"

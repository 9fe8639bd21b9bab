"""Finds the reason why PyTorch cannot use the GPUs of this machine; asks the driver and PyTorch."""

import os
import re
import subprocess
import sys

import torch

_SECONDS = 30.0  # nvidia-smi may take some seconds to wake up a GPU


def why_gpus_are_out_of_reach() -> str | None:
    """Return the reason why PyTorch finds no CUDA device here, and the remedy.

    Returns:
        A sentence without its full stop; ``None`` if ``nvidia-smi`` is missing or lists no GPU.
    """
    listed = len(re.findall("^GPU ", _nvidia_smi("-L"), re.MULTILINE))
    if not listed:
        return None
    # Drivers from 610 on print "CUDA UMD Version".
    found = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", _nvidia_smi())
    driver, built_for = found.group(1) if found else "unknown", torch.version.cuda
    fault = (
        f"nvidia-smi lists {listed} GPU(s) and a driver for CUDA {driver}, but PyTorch "
        f"{torch.__version__} ({f'built for CUDA {built_for}' if built_for else 'a CPU build'}) "
        "cannot use them"
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.match("[0-9A-Z]", visible):
        return f"{fault}: CUDA_VISIBLE_DEVICES={visible} hides them; unset it"
    if built_for is None:
        return f"{fault}: {_install(driver)}"
    if driver != "unknown" and _major(driver) < _major(built_for):
        return f"{fault}: update the driver to one for CUDA {built_for}, or {_install(driver)}"
    return f"{fault}: {_own_words()}"


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _install(driver: str) -> str:
    """Return how to install a build of PyTorch that the driver can run.

    A driver runs builds for its own major version of CUDA, and for all versions before.
    """
    version = torch.__version__.partition("+")[0]
    wanted = "CUDA" if driver == "unknown" else f"CUDA {_major(driver)}"
    return (
        f"install a build for {wanted} (https://pytorch.org/get-started/locally lists their "
        f"addresses): {sys.executable} -m pip install --force-reinstall torch=={version} "
        "--index-url ADDRESS"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _own_words() -> str:
    """Return the error that PyTorch raises when it is asked for CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"it says {str(error).splitlines()[0]!r}"
    return "it gives no reason"

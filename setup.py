"""Package metadata with loose requirements; exact versions are in constraints.txt."""

import os
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build in isolation does not look here
from megatron.native.extensions import EXTENSIONS, Extension  # noqa: E402 (needs the line above)


def as_built_here(extension: Extension, options: tuple[str, ...]) -> Pybind11Extension:
    """Return an extension as the machine that installs it compiles it for itself.

    An extension is built with every set of options: the processor's own, and portable ones. The
    name of the module holds a digest of its options and, for the former, of the processor. So a
    wheel that reaches another processor loads the portable module. The installation goes on where
    no compiler is at hand.
    """
    name = extension.name(options)
    return Pybind11Extension(
        f"{extension.package}.{name}",
        [extension.source.relative_to(ROOT).as_posix()],
        cxx_std=17,
        extra_compile_args=list(options),
        define_macros=[("MODULE_NAME", name)],
        optional=True,
    )


def built_here() -> list[tuple[Extension, tuple[str, ...]]]:
    """Return every extension with every set of its options.

    There are none with ``MEGATRON_EXTENSIONS=apart``: ``python -m megatron.native.build`` compiles
    a checkout's beside other work (``tools/setup_venv.sh``).
    """
    if os.environ.get("MEGATRON_EXTENSIONS") == "apart":
        return []
    return [(extension, options) for extension in EXTENSIONS for options in extension.options]


# A namespace package: other distributions may own further parts, as Megatron-LM owns megatron.core.
# Its own packages are those with an __init__.py, so a stray folder is not installed.
PACKAGES = [f"megatron.{name}" for name in find_packages("megatron")]

setup(
    name="megatron-vocab-parallel",
    version="0.2.0",
    description="Pretrain GPT with vocabulary parallelism in pipeline parallelism",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    project_urls={"Paper": "https://arxiv.org/abs/2411.05288"},
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["megatron", *PACKAGES],
    package_data={"": ["*.cpp", "py.typed", "table.txt", "page/*", "*.flags"]},
    ext_modules=[as_built_here(*own) for own in built_here()],
    py_modules=["pretrain_gpt"],
    entry_points={
        "console_scripts": [
            "pretrain-gpt = pretrain_gpt:main",
            "plan-pretraining = megatron.commands.plan_pretraining:main",
            "from-megatron = megatron.commands.from_megatron:main",
            "simulate-schedule = megatron.commands.simulate_schedule:main",
            "explore-schedules = megatron.commands.explore_schedules:main",
            "watch-run = megatron.commands.watch_run:main",
            "draw-schedule = megatron.commands.draw_schedule:main",
            "preprocess-data = megatron.commands.preprocess_data:main",
            "convert-checkpoint = megatron.commands.convert_checkpoint:main",
            "generate-text = megatron.commands.generate_text:main",
        ]
    },
    install_requires=[
        "blake3>=1.0",
        "pybind11>=2.12",
        "torch>=2.11",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "rich>=13",
    ],
    extras_require={
        "data": [  # for preprocess-data: .zst and .parquet files, --split-sentences
            "nltk>=3.9",
            "pyarrow>=15",
            "zstandard>=0.22",
        ],
        "solver": ["ortools>=9.10"],
        "tensorboard": ["tensorboard>=2.14"],  # for --tensorboard-dir
        "tokenizers": ["tiktoken>=0.7", "tokenizers>=0.20"],  # types other than sentencepiece's
        "tools": ["matplotlib>=3.8"],  # for the plot in the report of tools/benchmark.py
        "docs": ["mkdocs-material>=9.5"],  # mkdocs build
        "hugging-face": ["safetensors>=0.4"],  # for convert-checkpoint
        "lm-eval": ["lm-eval>=0.4.9"],  # for tools/evaluate.py
        "peers": [  # what some tests compare with; CI has it, and Chromium by apt
            "megatron-core>=0.14",
            "psutil>=5.9",  # megatron-core needs it to save, and does not say so
            "tensorboard>=2.14",
        ],
        "test": [
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "mkdocs-material>=9.5",
            "mypy>=1.10",
            "nltk>=3.9",
            "pyarrow>=15",
            "pytest>=8.2",
            "pytest-xdist>=3.5",
            "safetensors>=0.4",
            "ruff>=0.6",
            "tiktoken>=0.7",
            "tokenizers>=0.20",
            "transformers>=4.45",
            "zstandard>=0.22",
            "triton>=3.2; sys_platform == 'linux'",  # runs and compiles GPU programs without a GPU
        ],
    },
)

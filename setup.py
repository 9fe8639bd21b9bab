"""Package metadata with loose requirements; exact versions are in constraints.txt."""

import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build in isolation does not look here
from megatron.native.extensions import EXTENSIONS, Extension  # noqa: E402 (needs the line above)


def as_built_here(extension: Extension) -> Pybind11Extension:
    """Return an extension as the machine that installs it compiles it for itself.

    Without a compiler the installation goes on. A wheel that reaches another kind of processor is
    no danger: the name holds the processor, so nobody there will load the extension.
    """
    options = extension.options[0]
    name = extension.name(options)
    return Pybind11Extension(
        f"{extension.package}.{name}",
        [extension.source.relative_to(ROOT).as_posix()],
        cxx_std=17,
        extra_compile_args=list(options),
        define_macros=[("MODULE_NAME", name)],
        optional=True,
    )


setup(
    name="megatron-vocab-parallel",
    version="0.1.0",
    description="Pretrain GPT with vocabulary parallelism in pipeline parallelism",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron.data": ["*.cpp"], "megatron.kernels.cpu": ["*.cpp"]},
    ext_modules=[as_built_here(extension) for extension in EXTENSIONS],
    install_requires=[
        "pybind11>=2.12",
        "torch>=2.6",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "tyro>=0.9",
        "rich>=13",
    ],
    extras_require={
        "solver": ["ortools>=9.10"],
        "tools": ["matplotlib>=3.8"],
        "test": [
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "mypy>=1.10",
            "pytest>=8.0",
            "ruff>=0.6",
        ],
    },
)

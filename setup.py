"""Package metadata with loose requirements; exact versions are in constraints.txt."""

from setuptools import find_packages, setup

setup(
    name="megatron-vocab-parallel",
    version="0.1.0",
    description="Pretrain GPT with vocabulary parallelism in pipeline parallelism",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron.data": ["*.cpp"], "megatron.kernels.cpu": ["*.cpp"]},
    install_requires=[
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

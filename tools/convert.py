#!/usr/bin/env python3
"""Bring weights in from Hugging Face or Megatron-Core, and take ours out to Hugging Face.

python tools/convert.py import MODEL CHECKPOINTS --seq-length 4096
python tools/convert.py export CHECKPOINTS MODEL --like ORIGINAL --dtype bfloat16
python tools/convert.py import-core CORE CHECKPOINTS --vocab-size 50257

MODEL is a folder with config.json and safetensors files, of GPT-2, Llama 2 or 3, Mistral, Qwen 2 or
3, or the text models Gemma 1, 2 or 3. CHECKPOINTS is a folder as --save writes it. An import is a
checkpoint of iteration 0 that any layout starts from, with --load CHECKPOINTS --finetune
--use-checkpoint-args; it prints these flags. An export takes the checkpoint of any layout; no
padding of the vocabulary leaves. Tensors go through one by one, so that memory holds one file's.

CORE is a checkpoint of Megatron-Core in the format torch_dist. It tells the flags of its model;
what it does not, and the vocabulary without its padding, is given in the words of pretrain_gpt.py.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from megatron.checkpoint import folder
    from megatron.checkpoint.choose import choose
    from megatron.checkpoint.folder import DamagedError
    from megatron.checkpoint.foreign.families import FAMILIES
    from megatron.checkpoint.foreign.hugging_face import (
        TYPES,
        import_model,
        open_model,
        plan_export,
    )
    from megatron.checkpoint.foreign.layouts import ForeignError
    from megatron.checkpoint.foreign.megatron_core import (
        CoreReader,
        arguments,
        find,
        import_core,
        locate,
    )
    from megatron.checkpoint.foreign.weights import Advance
    from megatron.checkpoint.storage import SaveError
    from megatron.commands.arguments import number
    from megatron.config.command_line import parse
    from megatron.config.model_words import model_flags, words_of_megatron
    from megatron.model.config import ModelConfig
    from megatron.schedules.counted import counted

QUIET_SECONDS = 1.0
"""Work that takes no longer shows no bar."""

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show a bar of bytes on a terminal, for work of more than a second."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    begun, done, bar = time.monotonic(), 0, Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=total)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        bar.update(task, completed=done)
        late = time.monotonic() - begun > QUIET_SECONDS
        if late and not bar.live.is_started and bar.console.is_terminal:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def told_flags(root: Path, model: ModelConfig) -> str:
    """Return the flags that train from an import."""
    flags = model_flags(asdict(model))
    written = " ".join(" ".join([option, *words]) for option, words in flags.items())
    return (
        f"--load {root} --finetune --use-checkpoint-args\n"
        f"the last of these stands for: {written}\n"
        f"the vocabulary has {model.vocab_size} entries: give --vocab-size {model.vocab_size} if "
        "the tokenizer has fewer"
    )


def check_empty(root: Path) -> None:
    """Refuse to put an import beside the checkpoints of a run."""
    if found := folder.complete(root):
        raise ForeignError(
            f"{root} has {counted(len(found), 'checkpoint')} already: name another folder"
        )


def bring_in(args: argparse.Namespace) -> None:
    """Run ``import``."""
    check_empty(args.checkpoints)
    opened = open_model(args.model, args.seq_length)
    with progress(f"importing {args.model.name}", opened.size) as advance:
        where = import_model(opened, args.checkpoints, advance, not_finite=args.allow_not_finite)
    print(f"{where}: {counted(len(opened.recipes), 'tensor')} of {args.model}; train with")
    print(told_flags(args.checkpoints, opened.model))


def take_out(args: argparse.Namespace) -> None:
    """Run ``export``."""
    where = choose(args.checkpoints, args.step)
    told: list[Advance] = []
    plan = plan_export(
        where,
        lambda count: told[0](count),
        args.family,
        TYPES.get(args.dtype),
        args.like,
        args.tokenizer,
    )
    with progress(f"exporting {where.name}", plan.size) as advance:
        told.append(advance)
        plan.write(args.model, args.max_shard_size)
    print(f"{args.model}: {counted(sum(len(g.sizes) for g in plan.groups), 'tensor')} of {where}")


def bring_core_in(args: argparse.Namespace) -> None:
    """Run ``import-core``."""
    check_empty(args.checkpoints)
    where = find(args.core)
    saved, reader = arguments(where), CoreReader(where)
    try:
        words = words_of_megatron(vars(saved) if saved is not None else {}, args.flags)
        model = parse(words, 1).model
    except ValueError as error:
        first, *others = str(error).splitlines()
        more = f" (and {counted(len(others), 'mistake')} more)" if others else ""
        raise ForeignError(f"the model in {where}: {first}{more}") from error
    found = locate(reader, model)
    with progress(f"importing {where.name}", sum(t.size for t in found.values())) as advance:
        written = import_core(
            reader, found, model, args.checkpoints, advance, not_finite=args.allow_not_finite
        )
    print(f"{written}: {counted(len(found), 'tensor')} of {where}; train with")
    print(told_flags(args.checkpoints, model))


def byte_count(text: str) -> int:
    """Read a number of bytes, as 5GB."""
    for unit, factor in UNITS.items():
        digits = text.removesuffix(unit)
        if digits != text and digits.isdecimal() and int(digits):
            return int(digits) * factor
    raise argparse.ArgumentTypeError(
        f"'{text}': give a whole number and one of {', '.join(UNITS)}, as 5GB"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = _parse(arguments)
    try:
        args.run(args)
    except (ForeignError, DamagedError, SaveError) as error:
        sys.exit(f"error: {error}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    text = "write a checkpoint from a folder of Hugging Face's form"
    command = commands.add_parser("import", help=text, description=text)
    command.add_argument("model", type=Path, metavar="MODEL")
    command.add_argument("checkpoints", type=Path, metavar="CHECKPOINTS")
    command.add_argument(
        "--seq-length",
        type=number(1),
        help="tokens of a sample that training takes if it is not told (default: all positions)",
    )
    _allow_not_finite(command)
    command.set_defaults(run=bring_in)
    text = "write a checkpoint from one of Megatron-Core"
    command = commands.add_parser("import-core", help=text, description=text)
    command.add_argument("core", type=Path, metavar="CORE")
    command.add_argument("checkpoints", type=Path, metavar="CHECKPOINTS")
    _allow_not_finite(command)
    command.set_defaults(run=bring_core_in)
    text = "write a folder of Hugging Face's form from a checkpoint"
    command = commands.add_parser("export", help=text, description=text)
    command.add_argument("checkpoints", type=Path, metavar="CHECKPOINTS")
    command.add_argument("model", type=Path, metavar="MODEL")
    command.add_argument("--step", type=int, help="iteration (default: the last)")
    command.add_argument(
        "--family", choices=FAMILIES, help="default: the one of --like, or the first that fits"
    )
    origin = command.add_mutually_exclusive_group()
    origin.add_argument(
        "--like", type=Path, metavar="MODEL", help="take the tokenizer and token ids from there"
    )
    origin.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="take the tokenizer from there"
    )
    command.add_argument("--dtype", choices=TYPES, help="of the elements (default: as saved)")
    command.add_argument(
        "--max-shard-size",
        type=byte_count,
        default=byte_count("5GB"),
        metavar="SIZE",
        help="largest file of tensors (default: 5GB)",
    )
    command.set_defaults(run=take_out)
    args, flags = parser.parse_known_args(arguments)
    if flags and args.run is not bring_core_in:
        parser.error(f"unknown words: {' '.join(flags)}")
    args.flags = flags
    return args


def _allow_not_finite(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-not-finite",
        action="store_true",
        help="import NaN and infinite weights as they are (default: the first is refused by name)",
    )


if __name__ == "__main__":
    main()

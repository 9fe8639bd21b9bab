"""Bring weights in from Hugging Face or Megatron-Core, and take ours out to Hugging Face.

convert-checkpoint import MODEL CHECKPOINTS --seq-length 4096
convert-checkpoint export CHECKPOINTS MODEL --like ORIGINAL --dtype bfloat16
convert-checkpoint import-core CORE CHECKPOINTS --vocab-size 50257

MODEL is a folder with config.json and safetensors files, of GPT-2, Llama 2 or 3, Mistral, Qwen 2 or
3, the text models Gemma 1, 2 or 3, or of the mixtures Mixtral, Qwen 2 and 3 MoE, OLMoE, DeepSeek-V2
and V3 and GPT-OSS. CHECKPOINTS is a folder as --save writes it. An import is a checkpoint of
iteration 0 from which any layout starts, by the flags --load CHECKPOINTS --finetune
--use-checkpoint-args, which the command prints. An export takes the checkpoint of any layout, and
leaves out the padding of the vocabulary. Memory holds the tensors of one file at a time.

CORE is a checkpoint of Megatron-Core in the format torch_dist. Flags of the model that it does not
tell, and the size of the vocabulary without padding, are given by the flags of pretrain_gpt.py.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.environment import in_environment

with in_environment():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from megatron.checkpoint import folder
    from megatron.checkpoint.choose import choose
    from megatron.checkpoint.folder import DamagedError
    from megatron.checkpoint.foreign.core_reader import CoreReader
    from megatron.checkpoint.foreign.families import FAMILIES
    from megatron.checkpoint.foreign.hugging_face import (
        TYPES,
        import_model,
        open_model,
        plan_export,
    )
    from megatron.checkpoint.foreign.layouts import ForeignError
    from megatron.checkpoint.foreign.megatron_core import (
        arguments,
        find,
        import_core,
        locate,
    )
    from megatron.checkpoint.foreign.own_tokenizer import tokenizer_beside
    from megatron.checkpoint.foreign.weights import Advance
    from megatron.checkpoint.storage import SaveError
    from megatron.flags.command import read_command
    from megatron.flags.declare import flag, positional
    from megatron.flags.ranges import COUNT, NOT_NEGATIVE
    from megatron.flags.readable import as_error, told_as_error
    from megatron.model.settings import ModelSettings
    from megatron.run.command_line import parse
    from megatron.run.flag_files import read_flag_files
    from megatron.run.megatron_words import words_of_megatron
    from megatron.run.overrides import in_effect
    from megatron.run.topics import DECLARED
    from megatron.schedules.counted import counted

QUIET_SECONDS = 1.0
"""Work that takes no longer than this shows no bar."""

NOT_FINITE = "Import NaN and infinite weights as they are; without it they are refused by name."

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def byte_count(text: str) -> int:
    """Read a number of bytes such as 5GB.

    Raises:
        ValueError: the text is not a number of bytes.
    """
    for unit, factor in UNITS.items():
        digits = text.removesuffix(unit)
        if digits != text and digits.isdecimal() and int(digits):
            return int(digits) * factor
    raise ValueError(f"give a whole number and one of {', '.join(UNITS)}, as 5GB")


@dataclass(frozen=True)
class ImportFlags:
    """Write a checkpoint from a folder of Hugging Face's form."""

    model: Path = positional("Folder of Hugging Face's form.", "MODEL")
    checkpoints: Path = positional("Folder of the checkpoint.", "CHECKPOINTS")
    seq_length: int | None = flag(
        None,
        "Tokens of a sample that training takes if it is not told.",
        COUNT,
        unset="all positions",
    )
    allow_not_finite: bool = flag(False, NOT_FINITE)


@dataclass(frozen=True)
class CoreFlags:
    """Write a checkpoint from one of Megatron-Core, with flags of pretrain_gpt.py."""

    core: Path = positional("A checkpoint of Megatron-Core.", "CORE")
    checkpoints: Path = positional("Folder of the checkpoint.", "CHECKPOINTS")
    allow_not_finite: bool = flag(False, NOT_FINITE)


@dataclass(frozen=True)
class ExportFlags:
    """Write a folder of Hugging Face's form from a checkpoint."""

    checkpoints: Path = positional("Folder of --save.", "CHECKPOINTS")
    model: Path = positional("Folder of Hugging Face's form.", "MODEL")
    step: int | None = flag(None, "Iteration.", NOT_NEGATIVE, unset="the last")
    family: str | None = flag(
        None, "Of the model.", choices=tuple(FAMILIES), unset="that of --like, or the first to fit"
    )
    like: Path | None = flag(
        None,
        "Model whose tokenizer and token ids are taken.",
        unset="none",
        excludes="--tokenizer",
    )
    tokenizer: Path | None = flag(None, "Folder whose tokenizer is taken.", unset="none")
    dtype: str | None = flag(None, "Of the elements.", choices=tuple(TYPES), unset="as saved")
    max_shard_size: int = flag(
        byte_count("5GB"), "Largest file of tensors.", metavar="SIZE", reads=byte_count, unset="5GB"
    )


COMMANDS = {"import": ImportFlags, "import-core": CoreFlags, "export": ExportFlags}


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


def told_flags(root: Path, model: ModelSettings) -> str:
    """Return the flags with which a training starts from an import."""
    flags = model.flags()
    written = " ".join(" ".join([option, *words]) for option, words in flags.items())
    return (
        f"--load {root} --finetune --use-checkpoint-args\n"
        f"the last of these stands for: {written}\n"
        f"the vocabulary has {model.vocab_size} entries: give --vocab-size {model.vocab_size} if "
        "the tokenizer has fewer"
    )


def check_empty(root: Path) -> None:
    """Refuse a folder that already has checkpoints: an import must stand alone."""
    if found := folder.complete(root):
        raise ForeignError(
            f"{root} has {counted(len(found), 'checkpoint')} already: name another folder"
        )


def bring_in(args: ImportFlags) -> None:
    """Run ``import``."""
    check_empty(args.checkpoints)
    opened = open_model(args.model, args.seq_length)
    for note in opened.notes:
        print(f"note: {note}", file=sys.stderr)
    tokenizer, about = tokenizer_beside(args.model, opened.model)
    with progress(f"importing {args.model.name}", opened.size) as advance:
        where = import_model(
            opened,
            args.checkpoints,
            advance,
            not_finite=args.allow_not_finite,
            tokenizer=tokenizer,
        )
    print(f"{where}: {counted(len(opened.recipes), 'tensor')} of {args.model}; train with")
    print(told_flags(args.checkpoints, opened.model))
    if about:
        print(f"note: {about}", file=sys.stderr)


def take_out(args: ExportFlags) -> None:
    """Run ``export``."""
    where = choose(args.checkpoints, args.step)
    told: list[Advance] = []
    plan = plan_export(
        where,
        lambda count: told[0](count),
        args.family,
        None if args.dtype is None else TYPES[args.dtype],
        args.like,
        args.tokenizer,
    )
    with progress(f"exporting {where.name}", plan.size) as advance:
        told.append(advance)
        plan.write(args.model, args.max_shard_size)
    print(f"{args.model}: {counted(sum(len(g.sizes) for g in plan.groups), 'tensor')} of {where}")


def bring_core_in(args: CoreFlags, given: Sequence[str]) -> None:
    """Run ``import-core``; words of ``given`` may name flag files."""
    check_empty(args.checkpoints)
    where = find(args.core)
    saved, reader = arguments(where), CoreReader(where)
    try:
        words = words_of_megatron(vars(saved) if saved is not None else {}, given)
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


def _without_flag_files(arguments: Sequence[str] | None) -> Sequence[str]:
    """Return the words of the command line; those of ``import-core`` without flag files."""
    words = sys.argv[1:] if arguments is None else arguments
    if list(words[:1]) != ["import-core"]:
        return words
    found = read_flag_files(words)
    if found.mistakes:
        sys.exit(as_error("\n".join(found.mistakes)))
    flags, replaced = in_effect(found.flags, DECLARED)
    for note in (*found.notes, *replaced):
        print(f"note: {note}", file=sys.stderr)
    return [word for flag in flags for word in flag.words]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    of_training: list[str] = []
    flags = read_command(
        _without_flag_files(arguments), __doc__, COMMANDS, {"import-core": of_training}
    )
    with told_as_error(ForeignError, DamagedError, SaveError):
        match flags:
            case ImportFlags():
                bring_in(flags)
            case ExportFlags():
                take_out(flags)
            case CoreFlags():
                bring_core_in(flags, of_training)

"""Reads a launch script of Megatron-LM, and writes the line that starts the same training here.

from-megatron train_gpt.sh
from-megatron train_gpt.sh --set NNODES=16 --set 1=70B --predict H100 --vocab-size 128256
from-megatron llama3_8b.toml --nodes 8 --gpus-per-node 8 --model Llama-3-8B/config.json

The script is read as text, and nothing of it is run. The page tells the ranks, every flag with the
answer of pretrain_gpt.py (accepted, noted, refused), and the line to run here, as it is and with
the vocabulary split. Scripts start trainings by torchrun, python -m torch.distributed.launch, srun,
mpirun, deepspeed or accelerate. Files that the script sources are read too. A TOML file is a
configuration of torchtitan; a YAML file is one of Megatron-Bridge or NeMo, or lists flags. In a
Python file each function that returns a configuration of torchtitan or Megatron-Bridge is read as
data.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.commands.whole_process import reader_may_stop_early
    from megatron.flags.command import read
    from megatron.flags.declare import flag, positional
    from megatron.flags.groups import Flags
    from megatron.flags.ranges import COUNT, RANKS
    from megatron.flags.readable import as_error
    from megatron.foreign.as_json import as_json
    from megatron.foreign.faults import MOST_LAUNCHES
    from megatron.foreign.judge import Job, Judgement, judgement_of, with_numbers
    from megatron.foreign.launches import Launch
    from megatron.foreign.line import script_text
    from megatron.foreign.page import Source, page_of
    from megatron.foreign.predict import Gain, gain_of
    from megatron.foreign.read import read_source
    from megatron.native.files import write_text
    from megatron.planning.asked.model import model_of
    from megatron.simulator.costs.gpus import GPUS, gpu

_COMMAND = re.compile(r"(\$\(.*\)|\$\{.*\}|`.*`)=(.*)", re.DOTALL)


def _setting(word: str) -> tuple[str, str]:
    """Read NAME=VALUE, or the text of a command and its value.

    Raises:
        ValueError: the word has another form.
    """
    if found := _COMMAND.fullmatch(word):
        return " ".join(found[1].split()), found[2]
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d?", name, re.ASCII):
        raise ValueError("give NAME=VALUE, as NNODES=16, 1=70B for $1, or '$(hostname)=node-0'")
    if "\0" in value:
        raise ValueError("a value has no zero bytes")
    return name, value


# fmt: off
@dataclass(frozen=True)
class FromFlags:
    """A script, and its holes."""

    script: Path = positional(
        "Launch script (.sh), or configuration (.toml, .yaml, .py).", "SCRIPT")
    set: tuple[tuple[str, str], ...] = flag((),
        "Value of a variable of the script, of $1 and so on, or of a command $(...); it counts in "
        "place of what the script says. May be given several times.", metavar="NAME=VALUE",
        reads=_setting, repeats=True, unset="as the script says")
    nodes: int | None = flag(None, "Machines, in place of the script's number.", RANKS,
        unset="as the script says")
    gpus_per_node: int | None = flag(None, "Ranks of a machine, in place of the script's number.",
        RANKS, unset="as the script says")
    launch: int | None = flag(None, "Of several trainings in the script, the one to look at.",
        COUNT, unset="all")
    model: Path | None = flag(None,
        "Folder of Hugging Face's form, or its config.json, for a configuration that only names "
        "its model. Flags of the script count in place of its values.", metavar="FOLDER|JSON",
        unset="by the script")
    vocab_size: int | None = flag(None,
        "Entries of the vocabulary for --predict, if the script leaves them to the tokenizer.",
        COUNT, unset="by the script or --model")
    predict: str | None = flag(None,
        "GPU on which both lines are predicted, as it is and with the vocabulary split; this may "
        "take a minute.", metavar="GPU", choices=tuple(GPUS), any_case=True, unset="no prediction")
    json: bool = flag(False, "Print one JSON object.")
    output: Path | None = flag(None, "Script to write, with the line as it is.", names=("-o",),
        unset="none")
    output_split: Path | None = flag(None, "Script to write, with the vocabulary split.",
        unset="none")
# fmt: on


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: words of the command line, without the program; ``None``: the words of this process.

    Raises:
        SystemExit: with 2 if the script cannot be read; the line on stderr says why.
    """
    with reader_may_stop_early():
        own = read(argv, __doc__, FromFlags, rules=[_mistakes])[FromFlags]
        try:
            _answer(own)
        except (OSError, ValueError) as error:
            _end(error)


def _end(error: Exception) -> NoReturn:
    print(as_error(error), file=sys.stderr)
    sys.exit(2)


def _mistakes(flags: Flags) -> Iterator[str]:
    """Yield a line on each mistake that several flags make together."""
    own = flags[FromFlags]
    for option, path in (("--output", own.output), ("--output-split", own.output_split)):
        if path is not None and path.exists() and own.script.exists() and path.samefile(own.script):
            yield f"{option} {path}: this is the script that is read; give another name"
    if own.output is not None and own.output == own.output_split:
        yield f"--output-split {own.output}: --output has the same name; give another one"


def _answer(own: FromFlags) -> None:
    source, launches = read_source(own.script, dict(own.set), has_model=own.model is not None)
    if own.launch is not None:
        if own.launch > len(launches):
            raise ValueError(f"--launch {own.launch}: the script has {len(launches)}; choose one")
        launches = (launches[own.launch - 1],)
    if len(launches) > 1 and (own.output or own.output_split):
        lines = ", ".join(str(launch.line) for launch in launches)
        raise ValueError(
            f"{source.name} starts {len(launches)} trainings, in lines {lines}: choose the one to "
            f"write by --launch 1 to {len(launches)}"
        )
    answers = [_one(own, source, launch) for launch in launches[:MOST_LAUNCHES]]
    left = len(launches) - len(answers)
    if left:
        more = f"{left} more trainings of {source.name} are left out: --launch N chooses one"
        print(more, file=sys.stderr)
    if own.json:
        found = [as_json(source, *answer) for answer in answers]
        print(json.dumps({"launches": found, "left_out": left}, indent=2))
    else:
        rule = f"\n\n{'=' * 100}\n\n"
        print(rule.join(page_of(source, *answer) for answer in answers))
    _write(own, source, answers[0].judgement)


class _Answer(NamedTuple):
    """The answers to a training, with its prediction or the reasons why there is none."""

    judgement: Judgement
    gain: Gain | None
    faults: list[str]


def _one(own: FromFlags, source: Source, launch: Launch) -> _Answer:
    """Return the answers to a training."""
    ranks = with_numbers(launch.ranks, own.nodes, own.gpus_per_node)
    vocabulary = own.vocab_size
    if own.model is not None:
        words = _with_model(own.model, launch.words)
        launch = replace(launch, words=words)
    job = Job(source.holes, ranks, vocabulary)
    judgement = judgement_of(launch, job)
    if own.predict is None:
        return _Answer(judgement, None, [])
    try:
        return _Answer(judgement, gain_of(judgement, job, gpu(own.predict)), [])
    except ValueError as error:
        return _Answer(judgement, None, str(error).split("\n"))


def _with_model(path: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a model before other words, without flags that the others have."""
    given = {word.split("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    return (*model_of(path).words_without(given), *words)


def _write(own: FromFlags, source: Source, judgement: Judgement) -> None:
    """Write the scripts that are asked for."""
    for path, variant in ((own.output, judgement.as_is), (own.output_split, judgement.split)):
        if path is None:
            continue
        if variant is None:
            raise ValueError(f"--output-split {path}: the script splits the vocabulary already")
        write_text(path, script_text(judgement, variant, source.holes, source.name))
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()

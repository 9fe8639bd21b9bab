r"""Go on from prompts with a model that was trained, or score a text with it.

generate-text CHECKPOINTS --prompt "Once upon a time" --temperature 0.8 --top-p 0.9
torchrun --nproc-per-node 4 -m megatron.commands.generate_text CHECKPOINTS --ids \
    --prompts-file prompts.txt
generate-text CHECKPOINTS --ids --perplexity tokens.txt

CHECKPOINTS is a folder as --save and convert-checkpoint write it. Under torchrun the ranks share
the layers and the vocabulary. The layout of the training does not matter: the answers are the same.
The tokenizer is that of the training, of which the checkpoint keeps a copy, or the one that the
flags name. --ids takes and prints token ids instead, with blanks between them. A single answer is
printed as it comes.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.environment import in_environment

with in_environment():
    import torch
    import torch.distributed as dist

    from megatron.checkpoint.choose import choose, read_model
    from megatron.checkpoint.folder import DamagedError
    from megatron.checkpoint.saved_tokenizer import SavedTokenizer
    from megatron.checkpoint.storage import OtherModelError
    from megatron.data.tokenizers.settings import TYPES as TOKENIZERS
    from megatron.data.tokenizers.settings import TokenizerSettings
    from megatron.flags.command import read
    from megatron.flags.declare import flag, positional
    from megatron.flags.groups import Flags
    from megatron.flags.ranges import COUNT, NOT_NEGATIVE, PERCENT, SEED, Range
    from megatron.flags.readable import as_error
    from megatron.inference.generate import answers, generate
    from megatron.inference.model import InferenceModel, connected
    from megatron.inference.sampling import Sampling
    from megatron.inference.score import perplexity
    from megatron.inference.words import Words
    from megatron.native.files import read_text
    from megatron.parallel.environment import Launched, launched
    from megatron.schedules.counted import counted

_NO_WORDS = "give --tokenizer-type and --tokenizer-model, or --ids for token ids"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class GenerateFlags:
    """What is generated or scored."""

    checkpoints: Path = positional("Folder of the model.", "CHECKPOINTS")
    step: int | None = flag(None, "Iteration.", NOT_NEGATIVE, unset="the last")
    prompt: tuple[str, ...] = flag((), "What an answer goes on from; may be given again.",
        metavar="TEXT", reads=str, repeats=True)
    prompts_file: Path | None = flag(None, "A prompt in every line.", unset="none")
    perplexity: Path | None = flag(None, "Score this text instead.", unset="none")
    ids: bool = flag(False, "Prompts and answers are token ids.")
    end: int | None = flag(None, "Token that ends an answer.", NOT_NEGATIVE, metavar="ID",
        unset="the end of a document")
    max_new_tokens: int = flag(64, "Tokens of an answer.", COUNT)
    temperature: float = flag(0.0, "0: the likeliest token.",
        Range(1e-3, 1000, or_zero=True))
    top_k: int = flag(0, "Draw from so many; 0: from all.", NOT_NEGATIVE)
    top_p: float = flag(1.0, "Draw from this share; 1: from all.", PERCENT)
    seed: int = flag(1234, "Of what is drawn.", SEED)
    batch_size: int = flag(8, "Prompts at a time.", COUNT)
    no_cache: bool = flag(False, "Run all tokens again for each new one.")
    dtype: str | None = flag(None, "Of the weights.", choices=tuple(TYPES),
        unset="float32 on a CPU, bfloat16 on GPUs")
    seq_length: int | None = flag(None, "Tokens of a scored row.",
        Range(2, 1 << 30), unset="as in training")
    stride: int | None = flag(None, "Tokens scored at a time.", COUNT, unset="half a row")


@dataclass(frozen=True)
class TextFlags(TokenizerSettings):
    """Tokenizer, as in training."""

    tokenizer_type: str | None = flag(None, "Megatron's name of it.", choices=TOKENIZERS,
        unset="the checkpoint's; with --ids there are no words")
# fmt: on


def check_words(flags: Flags) -> Iterator[str]:
    """Yield the flags that are missing: a tokenizer (or ``--ids``), and a text to start from."""
    own = flags[GenerateFlags]
    if not own.ids and flags[TextFlags].tokenizer_type is None and not _remembers(own):
        yield _NO_WORDS
    if not own.prompt and own.prompts_file is None and own.perplexity is None:
        yield "give --prompt, --prompts-file or --perplexity"


def _remembers(args: GenerateFlags) -> bool:
    """Return whether a checkpoint remembers a tokenizer, or cannot be read, which ``run`` tells."""
    try:
        saved = SavedTokenizer.read(choose(args.checkpoints, args.step, checked=False))
    except DamagedError:
        return True
    return saved is not None and saved.settings.tokenizer_type is not None


def words_of(flags: Flags, where: Path, vocab_size: int, *, speak: bool) -> Words:
    """Return the converter between text and tokens; ``where``: folder of the checkpoint.

    Raises:
        ValueError: the tokenizer has more tokens than the model, or its copy is damaged.
    """
    own = flags[GenerateFlags]
    if own.ids:
        return Words.ids(vocab_size, own.end)
    found = Words.of_checkpoint(where, flags[TextFlags], own.end, vocab_size, speak=speak)
    if found is None:
        raise ValueError(_NO_WORDS)
    return found


def text_of(flag: str, path: Path) -> str:
    r"""Return the text of a file that a flag names, with ``\n`` at the ends of its lines.

    Raises:
        ValueError: the file is no text.
    """
    try:
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"{flag} {path} {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def prompts_of(args: GenerateFlags) -> list[str]:
    """Return the prompts that the flags give.

    Raises:
        ValueError: the file of prompts is no text, or there are no prompts.
    """
    found = list(args.prompt)
    if args.prompts_file is not None:
        lines = text_of("--prompts-file", args.prompts_file).splitlines()
        found += [line for line in lines if line.strip()]
    if not found:
        raise ValueError(f"--prompts-file {args.prompts_file}: there is no prompt in it")
    return found


def answer(model: InferenceModel, words: Words, args: GenerateFlags, how: Sampling) -> None:
    """Print the answers to all prompts, batch by batch; every rank calls this function."""
    texts = prompts_of(args)
    for begin in range(0, len(texts), args.batch_size):
        batch = texts[begin : begin + args.batch_size]
        steps = generate(
            model,
            [words.tokens(text) for text in batch],
            how,
            args.max_new_tokens,
            end=words.end,
            cached=not args.no_cache,
            first=begin,
        )
        if len(texts) == 1:
            stream(steps, words, texts[0], spoken=model.is_first)
            continue
        for text, found in zip(batch, answers(steps, len(batch)), strict=True):
            if model.is_first:
                print(joined(text, words.text(found), words), flush=True)


def stream(steps: Iterator[list[int | None]], words: Words, prompt: str, *, spoken: bool) -> None:
    """Print a prompt, and its answer token by token.

    Text that the next tokens may still change, such as half a character, is held back.
    """
    found: list[int] = []
    shown = ""
    if spoken:
        print(prompt, end="", flush=True)
    for [token] in steps:
        assert token is not None, "the only answer is not complete"
        found.append(token)
        text = joined("", words.text(found), words)
        if spoken and not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(shown):
            print(text.removeprefix(shown), end="", flush=True)
            shown = text
    if spoken:
        print(joined("", words.text(found), words).removeprefix(shown), flush=True)


def joined(prompt: str, text: str, words: Words) -> str:
    """Return a prompt and its answer as one text; ids are separated by a blank."""
    return prompt + (" " if words.are_ids and text else "") + text


def judge(model: InferenceModel, words: Words, text: Path, longest: int, stride: int) -> None:
    """Print the perplexity of a text; every rank calls this function."""
    tokens = words.tokens(text_of("--perplexity", text))
    found = perplexity(model, tokens, longest, stride)
    if model.is_first:
        print(
            f"perplexity {found.value:.4f}, loss {found.loss:.6f} over "
            f"{counted(found.tokens, 'token')}"
        )


def run(flags: Flags, place: Launched) -> None:
    """Generate or score as the flags say; every rank calls this function.

    Raises:
        ValueError: a flag is wrong, or a file is damaged.
    """
    args = flags[GenerateFlags]
    how = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    where = choose(args.checkpoints, args.step, checked=False)
    config = read_model(where)
    words = words_of(flags, where, config.vocab_size, speak=place.rank == 0)
    longest = args.seq_length or config.seq_length
    if args.perplexity is None:
        longest = max(len(words.tokens(text)) for text in prompts_of(args)) + args.max_new_tokens
    elif longest < 2 or (args.stride or 1) >= longest:
        raise ValueError(f"--stride {args.stride} with rows of {longest} tokens: give less")
    groups = connected(place)
    dtype = TYPES[args.dtype or ("bfloat16" if groups.device.type == "cuda" else "float32")]
    model = InferenceModel(where, groups, dtype, longest)
    if args.perplexity is None:
        answer(model, words, args, how)
    else:
        stride = args.stride or max(1, longest // 2)
        judge(model, words, args.perplexity, longest, stride)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    os.environ.setdefault("OMP_NUM_THREADS", "1" if "LOCAL_RANK" in os.environ else "2")
    speak = os.environ.get("RANK", "0") == "0"
    groups = (GenerateFlags, TextFlags)
    flags = read(arguments, __doc__, *groups, rules=(check_words,), speak=speak)
    place = Launched()
    try:
        place = launched()
        run(flags, place)
    except (ValueError, DamagedError, OtherModelError, OSError) as error:
        sys.exit(as_error(error) if place.rank == 0 else 1)
    finally:
        if dist.is_initialized() and place.world_size > 1:
            dist.destroy_process_group()


if __name__ == "__main__":  # torchrun -m starts it
    main()

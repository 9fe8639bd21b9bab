#!/usr/bin/env python3
"""Go on from prompts with a model that was trained, or score a text with it.

python tools/generate.py CHECKPOINTS --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model tokenizer.model --prompt "Once upon a time" --temperature 0.8 --top-p 0.9
torchrun --nproc-per-node 4 tools/generate.py CHECKPOINTS --ids --prompts-file prompts.txt
python tools/generate.py CHECKPOINTS --ids --perplexity tokens.txt

CHECKPOINTS is a folder as --save and tools/convert.py write it. Under torchrun the ranks share the
layers and the vocabulary, whatever the layout of the training was; the answers are the same.
Without a tokenizer, --ids takes and prints token ids, with blanks between them. A single answer is
printed as it comes.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    import torch
    import torch.distributed as dist

    from megatron.checkpoint.choose import choose, read_model
    from megatron.checkpoint.folder import DamagedError
    from megatron.checkpoint.storage import OtherModelError
    from megatron.commands.arguments import number
    from megatron.commands.tokenizer_options import add_tokenizer_options, tokenizer_of
    from megatron.inference.generate import answers, generate
    from megatron.inference.model import InferenceModel, connected
    from megatron.inference.sampling import Sampling
    from megatron.inference.score import perplexity
    from megatron.inference.words import Words
    from megatron.parallel.environment import Launched, launched
    from megatron.schedules.counted import counted

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def words_of(args: argparse.Namespace, vocab_size: int) -> Words:
    """Return what turns text to tokens and back.

    Raises:
        ValueError: the flags name no tokenizer, or one with more tokens than the model has.
    """
    if args.ids:
        return Words.ids(vocab_size, args.end)
    tokenizer = tokenizer_of(args)
    if tokenizer is None:
        raise ValueError("give --tokenizer-type and --tokenizer-model, or --ids for token ids")
    return Words.of(tokenizer, args.end, vocab_size)


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts that the flags give.

    Raises:
        ValueError: there are none.
    """
    found = list(args.prompt)
    if args.prompts_file is not None:
        lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
        found += [line for line in lines if line.strip()]
    if not found:
        raise ValueError("give --prompt, --prompts-file or --perplexity")
    return found


def answer(model: InferenceModel, words: Words, args: argparse.Namespace, how: Sampling) -> None:
    """Print the answers to all prompts, a batch at a time; every rank calls it."""
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
        )
        if len(texts) == 1:
            stream(steps, words, texts[0], spoken=model.is_first)
            continue
        for text, found in zip(batch, answers(steps, len(batch)), strict=True):
            if model.is_first:
                print(joined(text, words.text(found), words), flush=True)


def stream(steps: Iterator[list[int | None]], words: Words, prompt: str, *, spoken: bool) -> None:
    """Print a prompt and its answer as it comes.

    What a few tokens more may still change, such as half a character, is held back.
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
    """Return a prompt with its answer; ids have blanks between them."""
    return prompt + (" " if words.are_ids and text else "") + text


def judge(model: InferenceModel, words: Words, args: argparse.Namespace, longest: int) -> None:
    """Print the perplexity of a text; every rank calls it."""
    tokens = words.tokens(args.perplexity.read_text(encoding="utf-8"))
    found = perplexity(model, tokens, longest, args.stride or max(1, longest // 2))
    if model.is_first:
        print(
            f"perplexity {found.value:.4f}, loss {found.loss:.6f} over "
            f"{counted(found.tokens, 'token')}"
        )


def run(args: argparse.Namespace, place: Launched) -> None:
    """Do what the flags ask for; every rank calls it.

    Raises:
        ValueError: a flag is wrong, or a file is damaged.
    """
    how = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    where = choose(args.checkpoints, args.step, checked=False)
    config = read_model(where)
    words = words_of(args, config.vocab_size)
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
        judge(model, words, args, longest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = _parse(arguments)
    place = Launched()
    try:
        place = launched()
        run(args, place)
    except (ValueError, DamagedError, OtherModelError, OSError) as error:
        sys.exit(f"error: {error}" if place.rank == 0 else 1)
    finally:
        if dist.is_initialized() and place.world_size > 1:
            dist.destroy_process_group()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoints", type=Path, metavar="CHECKPOINTS")
    add("--step", type=int, help="iteration (default: the last)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given again")
    add("--prompts-file", type=Path, metavar="FILE", help="a prompt in every line")
    add("--perplexity", type=Path, metavar="FILE", help="score this text instead")
    add("--ids", action="store_true", help="prompts and answers are token ids")
    add("--end", type=int, metavar="ID", help="ends an answer (default: end of document)")
    add("--max-new-tokens", type=number(1), default=64, help="of an answer (default: 64)")
    add("--temperature", type=float, default=0.0, help="0: the likeliest token (default: 0)")
    add("--top-k", type=int, default=0, help="draw from so many; 0: from all (default: 0)")
    add("--top-p", type=float, default=1.0, help="draw from this share (default: 1, all)")
    add("--seed", type=int, default=1234, help="of what is drawn (default: 1234)")
    add("--batch-size", type=number(1), default=8, help="prompts at a time (default: 8)")
    add("--no-cache", action="store_true", help="run all tokens again for each new one")
    add("--dtype", choices=TYPES, help="default: float32 on a CPU, bfloat16 on GPUs")
    add("--seq-length", type=number(2), help="tokens of a scored row (default: as in training)")
    add("--stride", type=number(1), help="tokens scored at a time (default: half a row)")
    add_tokenizer_options(parser.add_argument_group("tokenizer, as in training"), required=False)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1" if "LOCAL_RANK" in os.environ else "2")
    main()

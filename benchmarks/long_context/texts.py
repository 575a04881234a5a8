"""Texts for the proof at length on a target without a chat template: the same tokens, cut long and cut short.

    python benchmarks/long_context/texts.py --target runs/gemma/target --out runs/gemma/texts

`mixed.jsonl` holds pieces of standard-library files whose lengths are log-uniform; `short.jsonl` holds the
same pieces cut into samples of at most `--short` tokens. So both hold the same text and the same supervised
tokens, and differ in how much of it stands before an anchor. `ctx-<tokens>.jsonl` holds prompts from other
files: the same places at every length, with more or less of the source before them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.long_context.prompts import log_uniform, source_files, write
from pipelines.target import load_tokenizer

ANSWER = 200  # tokens of the file that stay behind a place


def pieces(
    files: Iterator[list[int]], low: int, high: int, tokens: int, rng: random.Random
) -> list[list[int]]:
    """Consecutive pieces of token sequences, log-uniform in length, until they hold `tokens` tokens."""
    found: list[list[int]] = []
    total = 0
    for ids in files:
        start = 0
        while len(ids) - start >= low and total < tokens:
            piece = ids[start : start + log_uniform(rng, low, high)]
            found.append(piece)
            start += len(piece)
            total += len(piece)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=120_000, help="of each training set")
    parser.add_argument("--short", type=int, default=1024)
    parser.add_argument("--mixed", type=int, nargs=2, default=(512, 16_000))
    parser.add_argument("--heldout", type=int, default=8, help="prompts of each length")
    parser.add_argument("--heldout-longest", type=int, default=3, help="prompts of the last length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 16_000, 32_000])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.target)
    rng = random.Random(options.seed)

    def encode(file: Path) -> list[int]:
        text = file.read_text(encoding="utf-8", errors="ignore")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def texts(sequences: list[list[int]]) -> Iterator[dict[str, Any]]:
        return ({"text": tokenizer.decode(ids)} for ids in sequences)

    training = source_files("train")
    rng.shuffle(training)
    mixed = pieces(map(encode, training), *options.mixed, options.tokens, rng)
    short = [ids[at : at + options.short] for ids in mixed for at in range(0, len(ids), options.short)]
    rng.shuffle(short)
    write(options.out / "mixed.jsonl", texts(mixed))
    write(options.out / "short.jsonl", texts([ids for ids in short if len(ids) >= options.short // 8]))

    # One stream of all held-out files: what a place lacks in its own file, the files before it give.
    files = source_files("heldout")
    rng.shuffle(files)
    stream = [token for file in files for token in encode(file)]
    room = range(max(options.lengths), len(stream) - ANSWER)
    places = sorted(rng.sample(room, options.heldout))
    for length in options.lengths:
        write(
            options.out / f"ctx-{length:05d}.jsonl",
            (
                {
                    "id": f"place-{end}",
                    "category": "continue",
                    "prompt": tokenizer.decode(stream[end - length : end]),
                }
                for end in (places[: options.heldout_longest] if length == max(options.lengths) else places)
            ),
        )
    print(f"{len(mixed)} mixed and {len(short)} short texts, {len(places)} held-out places")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.tokenizing`: what it takes to tokenize the next turn of a conversation, in milliseconds.

A turn adds an answer and a question. It is tokenized whole, with what is cached of the turn before, and the new text by
itself; before each of these another conversation, as a gateway does between two turns. Medians over rounds of other
words. The tokens of both ways are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

from services.gateway.model import read_template
from services.gateway.text import CheckedIds, Tokenizer
from services.gateway.untrusted import ChatTemplate
from tandem.checkpoints.gguf import as_folder
from tandem.checkpoints.hub import find_model

SHARED = (4_000, 16_000, 60_000)  # tokens
NEW, LONG, OTHER = 45, 150, 2_000  # words of a message
WORDS = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split()
Message = dict[str, str]
Encode = Callable[[], Awaitable[CheckedIds]]


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in a gateway
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="one whose chat template has special tokens")
    parser.add_argument("--rounds", type=int, default=31)
    said = parser.parse_args()
    folder = as_folder(find_model(said.model).path)
    tokenizer, template = Tokenizer.load(folder), read_template(folder)
    if template is None:
        raise SystemExit("the model has no chat template")
    table = Table("shared tokens", "new", "whole", "cached", "new text alone", "cached / new text alone")
    for shared in SHARED:
        table.add_row(*asyncio.run(measured(tokenizer, template, shared, said.rounds)))
    Console().print(table)


async def measured(tokenizer: Tokenizer, template: ChatTemplate, shared: int, rounds: int) -> Sequence[str]:
    chance, messages, before, count = Random(shared), list[Message](), "", 0
    while count < shared:
        messages += turn(chance, LONG)
        before = template.render(messages)
        count = len(await tokenizer.encode_chat(before, ""))
    took: dict[str, list[float]] = {"whole": [], "cached": [], "new": []}
    for _ in range(rounds):
        after, other = (template.render([*messages, *turn(chance)]) for _ in range(2))
        ways: dict[str, Encode] = {
            "cached": partial(tokenizer.encode_chat, after, ""),
            # Of another turn: the tokenizer remembers words.
            "new": partial(tokenizer.encode, other.removeprefix(before), add_special_tokens=False),
            "whole": partial(tokenizer.encode, after, add_special_tokens=False),
        }
        found = {}
        for way, encode in ways.items():
            await tokenizer.encode(template.render([message(chance, "user", OTHER)]), add_special_tokens=False)
            begun = time.perf_counter()
            found[way] = await encode()
            took[way].append(time.perf_counter() - begun)
        if found["whole"] != found["cached"]:
            raise SystemExit("the tokens differ")
    whole, cached, alone = (1000 * median(took[way]) for way in ("whole", "cached", "new"))
    figures = (f"{ms:.2f}" for ms in (whole, cached, alone))
    return [f"{count:,}", f"{len(found['new'])}", *figures, f"{cached / alone:.2f}x"]


def turn(chance: Random, words: int = NEW) -> list[Message]:
    return [message(chance, "assistant", words), message(chance, "user", words)]


def message(chance: Random, role: str, words: int) -> Message:
    return {"role": role, "content": " ".join(chance.choices(WORDS, k=words))}


if __name__ == "__main__":
    main()

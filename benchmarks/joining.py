"""How long a model that joins keeps a gateway's loop waiting: its tokenizer loaded at once, and in parts.

    python -m benchmarks.joining --words 50000 --rounds 7

A thread loads it while another does what a loop does: it wants a turn every half a millisecond. Counted is the loading
thread's CPU time between two turns, so that a busy machine changes little. Medians of the longest of each round.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from services.gateway.text import Tokenizer
from services.gateway.untrusted import parts_of
from tests.gateway.tiny_model import large_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=50_000, help="size of the vocabulary")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokenizer", type=Path, help="folder of a model, instead of a random vocabulary")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = said.tokenizer or Path(made)
        if not said.tokenizer:
            large_tokenizer(said.words).save(str(folder / "tokenizer.json"))
        parts = parts_of(str(folder / "tokenizer.json"))
        if parts is None:
            raise SystemExit("this tokenizer is not taken apart: it is no BPE")
        ways = {"at once": lambda: Tokenizer.load(folder), "in parts": lambda: Tokenizer.load(folder, parts=parts)}
        held = {name: [longest_turn(load) for _ in range(said.rounds)] for name, load in ways.items()}
    whole, pieces = (1000 * median(found) for found in held.values())
    print(f"at once {whole:.1f} ms, in parts {pieces:.1f} ms: {whole / pieces:.1f}x shorter")


def longest_turn(load: Callable[[], object]) -> float:
    """Most CPU seconds of the loading thread between two turns of this one."""
    thread = threading.Thread(target=load)
    thread.start()
    clock, longest, before = time.pthread_getcpuclockid(thread.ident or 0), 0.0, 0.0
    while thread.is_alive():
        time.sleep(0.0005)
        try:
            now = time.clock_gettime(clock)
        except OSError:  # it has just ended
            break
        longest, before = max(longest, now - before), now
    thread.join()
    return longest


if __name__ == "__main__":
    main()

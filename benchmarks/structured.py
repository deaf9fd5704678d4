"""Answers held to grammars: that they are valid, what masks cost, what computing forced tokens at once gains.

    python -m benchmarks.structured schemas 1000      random JSON schemas; one answer that is not valid ends it with 1
    python -m benchmarks.structured masks             CPU time of a step with masks and without, by sequences in it
    python -m benchmarks.structured jump-forward      the same JSON answers with and without it

All on one thread, whose own CPU time counts, so that whatever else runs on the machine counts little; settings take
turns. The model is the demo one in float32, or --model in --dtype.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from jsonschema import Draft202012Validator

from tandem import grammar
from tandem.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams
from tandem.grammar import Grammars
from tandem.vocabulary import Vocabulary, load_tokenizer

DEMO = Path(__file__).parents[1] / "models" / "demo" / "target"
END = frozenset({0})
ROUNDS, BATCH, MOST_TOKENS, TOKENS = 5, 32, 80, 64
STREAMS = (1, 4, 16)
ORDER = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "customer": {
            "type": "object",
            "properties": {"family_name": {"type": "string", "maxLength": 8}, "newsletter": {"type": "boolean"}},
            "required": ["family_name", "newsletter"],
            "additionalProperties": False,
        },
        "shipping_method": {"enum": ["standard", "express", "collection in person"]},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["order_number", "customer", "shipping_method", "postal_code"],
    "additionalProperties": False,
}


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema with every kind that clients use, nested `depth` deep at most."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = dice.choice([*leaves, *["object", "array", "anyOf"] * depth])
    match kind:
        case "object":
            names = dice.sample(["a", "bee", "c d", "é", 'x"y', "family_name"], dice.randint(0, 3))
            required = [name for name in names if dice.random() < 0.6]
            properties = {name: random_schema(dice, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = dice.randint(0, 2)
            items = random_schema(dice, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + dice.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
        case "string":
            return {"type": "string", "minLength": dice.randint(0, 2), "maxLength": dice.randint(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": dice.choice(["^[a-f]{2,4}$", "^\\d+-\\d$", "^(x|yz)*$"])}
        case "integer":
            return {"type": "integer", "minimum": dice.randint(-5, 5), "maximum": dice.randint(10, 999)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": dice.randint(1, 9)}
        case "enum":
            return {"enum": dice.sample(["x", 1, None, True, "long one", 2.5], dice.randint(1, 4))}
        case "const":
            return {"const": dice.choice(["only", 7, [1, "b"], {"k": None}])}
    return {"type": kind}


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 4096), k=9)


def make_engine(model: Path = DEMO, dtype: str = "float32", **fields: Any) -> Engine:
    config = EngineConfig(
        model, "demo", dtype=dtype, num_blocks=1024, kv_budget_bytes=None, max_num_seqs=64, num_threads=1, **fields
    )
    return Engine(config)


def run(engine: Engine, asked: Mapping[str, SamplingParams]) -> dict[str, tuple[list[int], FinishReason]]:
    for name, sampling in asked.items():
        engine.add(Request(name, prompt(int(name)), sampling))
    tokens: dict[str, list[int]] = {name: [] for name in asked}
    found: dict[str, tuple[list[int], FinishReason]] = {}
    while len(found) < len(asked):
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.request_id] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                found[output.request_id] = tokens[output.request_id], output.finish_reason
    return found


class SchemaJudge:
    """Checks an answer against its schema: it is valid or, where it was cut, the beginning of a valid one."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEMO)
        self._vocabulary = Vocabulary(tokenizer)
        self._grammars = Grammars(DEMO, tokenizer.get_vocab_size())

    def wrong(self, schema: Mapping[str, Any], tokens: Sequence[int], reason: FinishReason) -> str:
        """The fault in words; "" if there is none."""
        if reason is not FinishReason.STOP:
            matcher = self._grammars.compile(grammar.of_json_schema(schema)).deep_copy()
            return "" if matcher.consume_tokens(list(tokens)) else "cut, and no beginning of a valid answer"
        text = b"".join(self._vocabulary.token_bytes(token) for token in tokens if token not in END)
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}: {text!r}"
        return "; ".join(error.message for error in Draft202012Validator(schema).iter_errors(value))


def check_schemas(engine: Engine, count: int, first: int = 0) -> Iterator[tuple[int, bool, str]]:
    """For each schema its number, whether its answer ended, and what is wrong with it."""
    judge, numbers = SchemaJudge(), iter(range(first, first + count))
    while batch := list(islice(numbers, BATCH)):
        schemas = {n: random_schema(random.Random(n)) for n in batch}
        asked = {
            str(n): SamplingParams(
                MOST_TOKENS, temperature=n % 3 / 2, seed=n, stop_token_ids=END, grammar=grammar.of_json_schema(schema)
            )
            for n, schema in schemas.items()
        }
        for name, (tokens, reason) in run(engine, asked).items():
            yield int(name), reason is FinishReason.STOP, judge.wrong(schemas[int(name)], tokens, reason)


def schemas(count: int) -> None:
    ended, wrong = 0, list[str]()
    for number, end, problem in check_schemas(make_engine(), count):
        ended += end
        if problem:
            wrong.append(f"schema {number}: {problem}: {json.dumps(random_schema(random.Random(number)))}")
    print(f"{count} random schemas: {ended} answers ended, {count - ended} were cut; {len(wrong)} were not valid")
    if wrong:
        raise SystemExit("\n".join(wrong))


def step_s(engine: Engine, asked: Mapping[str, SamplingParams]) -> tuple[float, int]:
    """CPU seconds of decoding, and its steps; prompts are prefilled first."""
    for name, sampling in asked.items():
        engine.add(Request(name, prompt(int(name)), sampling))
    while engine.stats().queued_tokens:
        engine.step()
    steps, started = 0, time.thread_time()
    while engine.has_work():
        engine.step()
        steps += 1
    return time.thread_time() - started, steps


def masks(model: Path, dtype: str) -> None:
    """As many tokens with masks as without, in turn; every sequence a schema of its own that 64 tokens do not end."""
    engine = make_engine(model, dtype, jump_forward=False)
    print("sequences | ms a step without masks | with | more, median of rounds | least, most")
    for streams in STREAMS:
        free = SamplingParams(TOKENS, temperature=0.0)
        made = [grammar.of_json_schema(endless(random.Random(n))) for n in range(streams)]
        settings = [
            {str(n): free for n in range(streams)},
            {str(n): replace(free, grammar=made[n]) for n in range(streams)},
        ]
        rounds = []
        for _ in range(1 + ROUNDS):
            rounds.append([seconds / steps for seconds, steps in (step_s(engine, asked) for asked in settings)])
        more = sorted(held / free_s - 1 for free_s, held in rounds[1:])
        without, held = (min(column) * 1e3 for column in zip(*rounds[1:], strict=True))
        print(f"{streams:9} | {without:.2f} | {held:.2f} | {median(more):+.1%} | {more[0]:+.1%}, {more[-1]:+.1%}")


def endless(dice: random.Random) -> dict[str, Any]:
    items = {"a": random_schema(dice), "b": random_schema(dice), "text": {"type": "string"}}
    rows = {"type": "object", "properties": items, "required": list(items), "additionalProperties": False}
    return {"type": "array", "items": rows, "minItems": 100}


def jump_forward(model: Path, dtype: str) -> None:
    engines = {on: make_engine(model, dtype, jump_forward=on) for on in (False, True)}
    made = grammar.of_json_schema(ORDER)
    print("sequences | steps without | with | CPU s without | with | times as fast")
    for streams in STREAMS:
        seconds, steps = {False: 1e9, True: 1e9}, {False: 0, True: 0}
        asked = {
            str(n): SamplingParams(150, temperature=n % 2, seed=n, stop_token_ids=END, grammar=made)
            for n in range(streams)
        }
        for _ in range(ROUNDS):
            for on, engine in engines.items():
                took, steps[on] = step_s(engine, asked)
                seconds[on] = min(seconds[on], took)
        without, with_ = seconds[False], seconds[True]
        counts = f"{steps[False]} | {steps[True]}"
        print(f"{streams:9} | {counts} | {without:.3f} | {with_:.3f} | {without / with_:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("schemas").add_argument("count", type=int)
    for name in ("masks", "jump-forward"):
        measuring = commands.add_parser(name)
        measuring.add_argument("--model", type=Path, default=DEMO)
        measuring.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    match chosen.command:
        case "schemas":
            schemas(chosen.count)
        case "masks":
            masks(chosen.model, chosen.dtype)
        case "jump-forward":
            jump_forward(chosen.model, chosen.dtype)


if __name__ == "__main__":
    main()

"""The JSON-Schema-Test-Suite against the grammars that schemas become: nothing that is not valid may be an answer.

    pip download --no-deps --no-binary :all: jsonschema && tar xf jsonschema-*.tar.gz      its sources have the suite
    python -m benchmarks.json_schema_suite jsonschema-*/json/tests/draft{4,6,7,2019-09,2020-12}

A schema that grammars cannot follow is refused, which is right. Of others every value of the suite is tried, as text:
an invalid one that the grammar takes ends it with 1. Grammars may be stricter than their schemas: of objects they want
the properties in order, and no others. `format` is no part of this: the suite has it as optional.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from tandem.grammar import InvalidGrammar, grammar_of

BYTES = LLTokenizer("byte")


class Case(NamedTuple):
    """`taken` None: the schema is refused."""

    name: str
    valid: bool
    taken: bool | None


def takes(made: str, text: str) -> bool:
    """True if the text is a whole answer of the grammar."""
    matcher = LLMatcher(BYTES, made, log_level=0)
    tokens = list(text.encode())
    return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())


def cases(file: Path) -> Iterator[Case]:
    for group in json.loads(file.read_text(encoding="utf-8")):
        made = grammar_or_none(group["schema"])
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            name = f"{file.parent.name}/{file.name}: {group['description']}: {test['description']}"
            yield Case(name, test["valid"], None if made is None else takes(made, text))


def grammar_or_none(schema: Any) -> str | None:
    try:
        return grammar_of("json", schema)
    except InvalidGrammar:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    wrong = []
    print("folder | values of refused schemas | invalid ones refused | valid ones taken | valid ones not taken | wrong")
    for folder in parser.parse_args().folders:
        found = [case for file in sorted(folder.glob("*.json")) for case in cases(file)]
        count = Counter((case.taken, case.valid) for case in found if case.taken is not None)
        unfit = sum(case.taken is None for case in found)
        kinds = (count[False, False], count[True, True], count[False, True], count[True, False])
        print(" | ".join(map(str, (folder.name, unfit, *kinds))))
        wrong += [case.name for case in found if case.taken and not case.valid]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()

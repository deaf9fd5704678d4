"""Answers that follow a grammar: a JSON schema, a regular expression, a choice. The engine and the gateway may enter.

    gateway   a client's schema -> grammar, checked      in its helper process, before anything is reserved
    worker    grammar -> compiled, once                   cached by its text, so the next request only copies it
              tokens of the answer -> state               followed as they come; after a preemption or a move, again
              from
                                                          the first token
              state -> mask                               one bit for each token that may come next

The mask depends only on the grammar and the tokens before. llguidance computes it.
"""

from tandem.grammar.asked import KINDS, MAX_CHOICES, STACK_BYTES, Behind, grammar_of
from tandem.grammar.build import (
    behind_thoughts,
    check,
    of_calls,
    of_choice,
    of_grammar,
    of_json_schema,
    of_regex,
    of_tags,
)
from tandem.grammar.compiled import Grammars, Guide
from tandem.grammar.errors import InvalidGrammar

__all__ = [
    "KINDS",
    "MAX_CHOICES",
    "STACK_BYTES",
    "Behind",
    "Grammars",
    "Guide",
    "InvalidGrammar",
    "behind_thoughts",
    "check",
    "grammar_of",
    "of_calls",
    "of_choice",
    "of_grammar",
    "of_json_schema",
    "of_regex",
    "of_tags",
]

"""The worst that a client can send: for each door and field, what takes longest to read for its size."""

from __future__ import annotations

from collections.abc import Callable

from tandem.v1 import llm_pb2
from tests.gateway.peers import MODEL

SIZE = 15_000_000  # bytes; a megabyte less than are taken
Body = Callable[[], bytes]


def many(part: bytes, separator: bytes = b",") -> bytes:
    """As often as fits."""
    return part + (separator + part) * ((SIZE - len(part)) // len(separator + part))


def field(name: str, value: bytes, *others: bytes) -> bytes:
    said = (b'"model":"%b"' % MODEL.encode(), b'"%b":%b' % (name.encode(), value), *others)
    return b"{" + b",".join(said) + b"}"


def numbered(form: bytes, count: int) -> bytes:
    return b",".join(form % i for i in range(count))


PROMPT, MESSAGES = b'"prompt":[5,6]', b'"messages":[{"role":"user","content":"x"}]'
WIDE = b"[" + many(b"[7]") + b"]"
MAP = b"{" + numbered(b'"%d":1', SIZE // 12) + b"}"
TEXT = b'"' + b"x" * SIZE + b'"'
DEEP = b"[" * (SIZE // 2) + b"]" * (SIZE // 2)
NESTED = b"[" + many(b"[" * 60 + b"]" * 60) + b"]"
IDS = b"[" + many(b"7") + b"]"
LONG_IDS = b"[" + b"7," * 120_000 + b"7]"
STRINGS = b"[" + many(b'"x"') + b"]"
EMPTY_STRINGS = b"[" + many(b'""') + b"]"

# Of both endpoints that generate.
FIELDS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "stop": lambda: ("stop", STRINGS),
    "stop-long": lambda: ("stop", TEXT),
    "bad_words": lambda: ("bad_words", EMPTY_STRINGS),
    "logit_bias": lambda: ("logit_bias", MAP),
    "stop_token_ids": lambda: ("stop_token_ids", IDS),
    "allowed_token_ids": lambda: ("allowed_token_ids", b"[" + numbered(b"%d", SIZE // 8) + b"]"),
    "metadata": lambda: ("metadata", MAP.replace(b":1", b':""')),
    "unknown": lambda: ("nobody_knows_it", WIDE),
    "unknown-deep": lambda: ("nobody_knows_it", DEEP),
    "unknown-nested": lambda: ("nobody_knows_it", NESTED),
    "unknown-map": lambda: ("nobody_knows_it", MAP),
    "many-unknown": lambda: ("a", b"1," + numbered(b'"x%d":1', SIZE // 14)),
    "guided_json": lambda: ("guided_json", b'{"enum":' + WIDE + b"}"),
    "guided_choice": lambda: ("guided_choice", STRINGS),
    "guided_regex": lambda: ("guided_regex", TEXT),
    "guided_grammar": lambda: ("guided_grammar", TEXT),
    "response_format": lambda: ("response_format", b'{"type":"json_schema","json_schema":{"schema":%b}}' % MAP),
    "structured_outputs": lambda: ("structured_outputs", MAP),
    "seed": lambda: ("seed", b"1" * SIZE),
    "user": lambda: ("user", TEXT),
    "escapes": lambda: ("user", b'"' + rb"\u0041" * (SIZE // 6) + b'"'),
    "same-again": lambda: ("n", b"1," + many(b'"n":1')),
}

COMPLETIONS: dict[str, Body] = {
    "one-token-prompts": lambda: field("prompt", WIDE),
    "empty-prompts": lambda: field("prompt", b"[" + many(b"[]") + b"]"),
    "texts": lambda: field("prompt", EMPTY_STRINGS),
    "token-ids": lambda: field("prompt", IDS),
    "text": lambda: field("prompt", TEXT),
    "objects": lambda: field("prompt", b"[" + many(b"{}") + b"]"),
    "128-answers": lambda: field("prompt", LONG_IDS, b'"n":128', b'"max_tokens":2'),
    "128-token-prompts": lambda: field(
        "prompt", b"[" + numbered(b"[%d" + b",7" * 58_000 + b"]", 128) + b"]", b'"max_tokens":2'
    ),
    "128-texts": lambda: field("prompt", b"[" + numbered(b'"%d' + b"x!" * 2000 + b'"', 128) + b"]", b'"max_tokens":2'),
    "echo": lambda: field("prompt", LONG_IDS, b'"echo":true', b'"max_tokens":2'),
    "prompt_logprobs": lambda: field("prompt", LONG_IDS, b'"prompt_logprobs":1', b'"max_tokens":2'),
    "streamed-prompt_logprobs": lambda: field(
        "prompt", LONG_IDS, b'"prompt_logprobs":1', b'"max_tokens":2', b'"stream":true'
    ),
    "echoed-logprobs": lambda: field("prompt", LONG_IDS, b'"echo":true', b'"logprobs":1', b'"max_tokens":2'),
    "128-long-texts": lambda: field(
        "prompt", b"[" + numbered(b'"%d' + b"x!" * 40_000 + b'"', 128) + b"]", b'"max_tokens":2'
    ),
    "list": lambda: WIDE,
    "spaces": lambda: b" " * SIZE,
    "no-json": lambda: b"x" * SIZE,
    "unfinished": lambda: field("prompt", WIDE)[:-1],
    "model": lambda: b'{"model":' + TEXT + b"," + PROMPT + b"}",
    "no-utf-8": lambda: field("prompt", b'"' + b"\xff" * SIZE + b'"'),
}
COMPLETIONS |= {name: lambda made=made: field(*made(), PROMPT) for name, made in FIELDS.items()}  # type: ignore[misc]

MESSAGE = b'{"role":"user","content":"x"}'
PART = b'{"type":"text","text":""}'
CALL = b'{"function":{"name":"f","arguments":"{}"}}'
TOOL = b'{"type":"function","function":{"name":"f"}}'
CHAT: dict[str, Body] = {
    "messages": lambda: field("messages", b"[" + many(MESSAGE) + b"]"),
    "fitting-messages": lambda: field("messages", b"[" + b",".join([MESSAGE] * 20_000) + b"]"),
    "empty-messages": lambda: field("messages", b"[" + many(b"{}") + b"]"),
    "parts": lambda: field("messages", b'[{"role":"user","content":[' + many(PART) + b"]}]"),
    "content": lambda: field("messages", b'[{"role":"user","content":' + TEXT + b"}]"),
    "contents": lambda: field("messages", b"[" + many(b'{"role":"user","content":"' + b"x" * 4000 + b'"}') + b"]"),
    "calls": lambda: field("messages", b'[{"role":"assistant","tool_calls":[' + many(CALL) + b"]}]"),
    "arguments": lambda: field(
        "messages",
        b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":%b}"}}]}]' % WIDE,
    ),
    "message-extras": lambda: field("messages", b'[{"role":"user","content":"x","y":' + WIDE + b"}]"),
    "tools": lambda: field("tools", b"[" + many(TOOL) + b"]", MESSAGES),
    "tool-parameters": lambda: field(
        "tools", b'[{"type":"function","function":{"name":"f","parameters":{"enum":%b}}}]' % WIDE, MESSAGES
    ),
    "tool_choice": lambda: field("tool_choice", WIDE, MESSAGES),
    "chat_template_kwargs": lambda: field("chat_template_kwargs", MAP, MESSAGES),
}
CHAT |= {
    name: lambda made=FIELDS[name]: field(*made(), MESSAGES)  # type: ignore[misc]
    for name in ("logit_bias", "unknown", "unknown-nested", "guided_json")
}

TOKENIZE: dict[str, Body] = {
    "text": lambda: field("prompt", TEXT),
    "fitting-text": lambda: field("prompt", b'"' + b"x!" * 60_000 + b'"', b'"return_token_strs":true'),
    "messages": CHAT["messages"],
    "fitting-messages": CHAT["fitting-messages"],
    "tools": CHAT["tools"],
    "unknown": lambda: field("nobody_knows_it", WIDE, PROMPT),
}
DETOKENIZE: dict[str, Body] = {
    "tokens": lambda: field("tokens", IDS),
    "fitting-tokens": lambda: field("tokens", LONG_IDS),
    "lists": lambda: field("tokens", WIDE),
    "unknown": lambda: field("nobody_knows_it", WIDE, b'"tokens":[7]'),
}
ADAPTER: dict[str, Body] = {
    "name": lambda: field("lora_name", TEXT, b'"lora_path":"x"'),
    "path": lambda: field("lora_path", TEXT, b'"lora_name":"x"'),
    "unknown": lambda: field("nobody_knows_it", WIDE, b'"lora_name":"x"', b'"lora_path":"x"'),
}
PATHS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/load_lora_adapter": ADAPTER,
    "/v1/unload_lora_adapter": ADAPTER,
}


def repeated(number: int, part: bytes = b"", size: int = SIZE) -> bytes:
    """A field of protobuf that is given again and again."""
    one = _key(number, 2) + _varint(len(part)) + part
    return one * (size // len(one))


def within(number: int, data: bytes) -> bytes:
    """A message's field with such a message in it."""
    return _key(number, 2) + _varint(len(data)) + data


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


MODEL_FIELD = within(1, MODEL.encode())
USER = within(1, b"user") + within(2, b"x")
MESSAGES_FIELD = within(3, within(1, USER))
IDS_FIELD = within(4, within(1, b"\x05"))
GRPC: dict[str, Body] = {
    "token-ids": lambda: within(4, within(1, b"\x07" * SIZE)),
    "unpacked-token-ids": lambda: within(4, b"\x08\x07" * (SIZE // 2)),
    "fitting-token-ids": lambda: within(4, within(1, b"\x07" * 120_000)) + b"\x58\x80\x01" + within(5, b"\x48\x02"),
    "text": lambda: within(2, b"x" * SIZE),
    "messages": lambda: within(3, repeated(1)),
    "user-messages": lambda: within(3, repeated(1, USER)),
    "fitting-messages": lambda: within(3, repeated(1, USER, 20_000 * 11)),
    "calls": lambda: within(3, within(1, within(1, b"assistant") + repeated(3))),
    "template-kwargs": lambda: within(3, within(1, USER) + within(4, repeated(1, within(1, b"a") + within(2, b"")))),
    "tools": lambda: MESSAGES_FIELD + repeated(20),
    "stop": lambda: IDS_FIELD + within(5, repeated(12)),
    "stop_token_ids": lambda: IDS_FIELD + within(5, within(13, b"\x07" * SIZE)),
    "allowed_token_ids": lambda: IDS_FIELD + within(5, within(18, b"\x07" * SIZE)),
    "logit_bias": lambda: IDS_FIELD + within(5, repeated(8)),
    "logit_biases": lambda: IDS_FIELD + within(5, b"".join(within(8, b"\x08" + _varint(i)) for i in range(SIZE // 6))),
    "bad_words": lambda: IDS_FIELD + within(5, repeated(19)),
    "bad_words_token_ids": lambda: IDS_FIELD + within(5, repeated(20)),
    "choices": lambda: IDS_FIELD + within(13, within(3, repeated(1))),
    "json": lambda: IDS_FIELD + within(13, within(1, b'{"enum":' + WIDE[: SIZE - 1] + b"}")),
    "same-again": lambda: IDS_FIELD + b"\x58\x01" * (SIZE // 2),
    "unknown": lambda: IDS_FIELD + repeated(999),
    "unknown-groups": lambda: IDS_FIELD + (_key(999, 3) + _key(999, 4)) * (SIZE // 4),
    "no-message": lambda: b"\xff" * SIZE,
}


def message(name: str) -> bytes:
    """The message of a call to Generate."""
    return MODEL_FIELD + GRPC[name]()


assert llm_pb2.GenerateRequest.FromString(MODEL_FIELD + MESSAGES_FIELD).messages.messages[0].role == "user"

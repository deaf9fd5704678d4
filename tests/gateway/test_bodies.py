"""Each API's bodies are read by one reader: a large one, in pieces, says what it says when it is small."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from services.gateway.apis.app import GENERATING, OF_TEXT
from services.gateway.apis.messages import COUNTED, MESSAGES
from services.gateway.bodies import BodyReader, ChatPrompt, Incoming, PromptBounds, rendered
from services.gateway.errors import InvalidRequest
from services.gateway.grpc.reader import STREAMED, UNARY
from services.gateway.untrusted import ChatTemplate
from tandem.v1 import llm_pb2

pytestmark = pytest.mark.fast
BOUNDS = PromptBounds(prompts=4, tokens=64, characters=400, vocab_size=100)
TEMPLATE = ChatTemplate(
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ enable_thinking }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}", {},
)  # fmt: skip
READERS: dict[str, BodyReader[Any]] = {
    **{path: reader for path, _, reader in (*GENERATING, *OF_TEXT)},
    "/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNTED,
}  # fmt: skip
SAID: dict[str, Any] = {"model": "m"}
TURNS = [{"role": "user", "content": "hi"}]
CALLED = [
    *TURNS,
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MORE = {"seed": 3, "temperature": 0.5, "cache_salt": "s", "user": "u"}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": CALLED, "tools": TOOLS, "tool_choice": "required", "n": 2, **MORE},
        {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": True}, "logprobs": True, "top_logprobs": 2},
        {"messages": TURNS, "response_format": {"type": "json_object"}, "truncate_prompt_tokens": 2},
    ],
    "/v1/completions": [
        {"prompt": "a", "echo": True, "best_of": 2, **MORE},
        {"prompt": ["a", "b"], "stop": "x", "logit_bias": {"5": 1.5}},
        {"prompt": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2},
    ],
    "/v1/embeddings": [{"input": ["a", [1, 2]], "dimensions": 3, "encoding_format": "base64"}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", {"text": "c"}]}, {"text_1": ["a", "b"], "text_2": ["c", "d"]}],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False}],
    "/v1/responses": [
        {"input": "hi", "instructions": "be brief", "tools": [{"type": "function", "name": "f", "parameters": {}}],
         "max_output_tokens": 5, "seed": 3, "metadata": {"a": "b"}},
        {"input": TURNS, "store": False, "truncation": "auto"},
    ],
    "/v1/responses/input_tokens": [{"input": TURNS}],
    "/tokenize": [{"prompt": "a", "add_special_tokens": False}, {"messages": TURNS, "return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/v1/messages": [
        {"messages": TURNS, "system": "be brief", "max_tokens": 5, "stop_sequences": ["x"], "top_k": 3,
         "thinking": {"type": "enabled", "budget_tokens": 9}},
        {"messages": TURNS, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ],
    "/v1/messages/count_tokens": [{"messages": TURNS, "system": [{"type": "text", "text": "be brief"}]}],
}  # fmt: skip
SETTINGS = llm_pb2.SamplingParams(temperature=0.5, max_tokens=7)
CHATS = llm_pb2.ChatMessages(messages=[llm_pb2.ChatMessage(role="user", content="hi")], reasoning_effort="low")
REQUESTS = [
    llm_pb2.GenerateRequest(model="m", prompt="a", sampling=SETTINGS, tenant="t"),
    llm_pb2.GenerateRequest(
        model="m", token_ids=llm_pb2.TokenIds(ids=[1, 2, 3]), truncate_prompt_tokens=2, sampling=SETTINGS
    ),
    llm_pb2.GenerateRequest(model="m", messages=CHATS, tools=[llm_pb2.Tool(name="f")], n=2, sampling=SETTINGS),
]


def prompts(body: Incoming[Any]) -> list[str | list[int]]:
    found = body.prompts(BOUNDS, TEMPLATE)
    if isinstance(found, ChatPrompt):
        return [rendered(found, TEMPLATE, BOUNDS)]
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in found]


def in_pieces(reader: BodyReader[Any], data: bytes) -> Incoming[Any]:
    """Read it as a large body is read; what helper processes get and return is pickled."""
    reduced = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(reader)).reduce(data, BOUNDS, TEMPLATE)))
    return Incoming(reader, reader.parse(reduced.fields), "", reduced)


def test_every_api_is_here() -> None:
    assert BODIES.keys() == READERS.keys()


@pytest.mark.parametrize(("path", "said"), [(path, said) for path, bodies in BODIES.items() for said in bodies])
def test_a_large_body_says_what_a_small_one_says(path: str, said: dict[str, Any]) -> None:
    reader, data = READERS[path], json.dumps(SAID | said).encode()
    whole, large = Incoming(reader, reader.parse(data)), in_pieces(reader, data)
    assert prompts(large) == prompts(whole)
    taken = {"messages", "prompt", "input", "text_1", "text_2", "query", "documents", "tokens", "system"}
    left = {"metadata"} if "metadata" not in large.body.model_fields_set else set()
    fields = [
        one.body.model_dump(exclude_unset=True, exclude_none=True, exclude=taken | left) for one in (whole, large)
    ]
    assert fields[1] == fields[0]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.WhichOneof("input"))
@pytest.mark.parametrize("reader", [STREAMED, UNARY], ids=["streamed", "unary"])
def test_so_does_a_large_message(reader: BodyReader[Any], request_: llm_pb2.GenerateRequest) -> None:
    sent = llm_pb2.GenerateUnaryRequest(generate=request_) if reader is UNARY else request_
    large = in_pieces(reader, sent.SerializeToString())
    assert prompts(large) == prompts(Incoming(reader, request_))
    field = request_.WhichOneof("input")
    assert large.body.WhichOneof("input") == field
    left = []
    for one in (request_, large.body):
        left.append(copy := llm_pb2.GenerateRequest.FromString(one.SerializeToString()))
        copy.ClearField(field)
    assert left[1] == left[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/detokenize"])
def test_ids_are_checked_where_they_are_read(path: str) -> None:
    name = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}[path]
    for ids, problem in (([1, 100], "vocab"), ([1] * 65, "maximum context length")):
        with pytest.raises(InvalidRequest, match=problem) as refused:
            in_pieces(READERS[path], json.dumps(SAID | {name: ids}).encode())
        assert refused.value.param == name

"""Requests are refused no more strictly than by the APIs that are spoken: hints, documents, what others have made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from tandem import grammar
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT
from tests.gateway.test_messages_fields import TEMPLATE, USER, template
from tests.gateway.tools.test_calls import prompt_in, says

__all__ = ["says"]  # a fixture
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 9},
    "/v1/messages": {"model": MODEL, "messages": [USER], "max_tokens": 9},
}
CHATS, RESPONSES, MESSAGES = PATHS
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HELD = {
    "structured_outputs": ({"regex": "a+"}, grammar.of_regex("a+")),
    "guided_json": (SCHEMA, grammar.of_json_schema(SCHEMA)),
    "guided_regex": ("b+", grammar.of_regex("b+")),
    "guided_choice": (["x", "y"], grammar.of_choice(["x", "y"])),
    "guided_grammar": ('start: "a"', grammar.of_grammar('start: "a"')),
}


async def post(http: httpx.AsyncClient, path: str, **more: Any) -> Any:
    answer = await http.post(path, json=PATHS[path] | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(http: httpx.AsyncClient, path: str, **more: Any) -> Any:
    """Returns what the error says of the field that is wrong; Anthropic's errors have no place for its name."""
    answer = await http.post(path, json=PATHS[path] | more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"] if path == MESSAGES else (error["param"], error["message"])


@pytest.mark.parametrize(
    ("path", "hints"),
    [
        (CHATS, {"verbosity": "high", "reasoning_effort": "ultra", "service_tier": "fast", "store": True}),
        (CHATS, {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}] * 9}}),
        (CHATS, {"prediction": {"type": "content", "content": "x" * LARGE}}),
        (CHATS, {"prompt_cache_retention": "forever", "prompt_cache_key": "k", "safety_identifier": "s"}),
        (RESPONSES, {"text": {"verbosity": "high"}, "reasoning": {"effort": "ultra", "summary": "long"}}),
        (RESPONSES, {"service_tier": "fast", "prompt_cache_retention": "forever", "max_tool_calls": 3}),
        (RESPONSES, {"context_management": []}),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}, "output_config": {"effort": "ultra"}}),
        (MESSAGES, {"service_tier": "fast", "metadata": {"user_id": 5}, "betas": ["new-2030-01-01"]}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_hints_that_nobody_knows_are_as_none(
    http: httpx.AsyncClient, peers: Peers, path: str, hints: dict[str, Any]
) -> None:
    await post(http, path)
    await post(http, path, **hints)
    plain, hinted = peers.decode.seen
    assert (hinted.token_ids, hinted.priority) == (plain.token_ids, plain.priority)


async def test_a_hint_is_a_short_text(http: httpx.AsyncClient) -> None:
    for path, hints, named in (
        (CHATS, {"verbosity": 5}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "x" * 600}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"summary": "x" * 600}}, "reasoning.summary"),
        (RESPONSES, {"max_tool_calls": 0}, "max_tool_calls"),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "x" * 600}}, "thinking.display"),
        (MESSAGES, {"output_config": {"effort": 3}}, "output_config.effort"),
    ):
        assert named in str(await refusal(http, path, **hints))


async def test_thoughts_with_an_unknown_display_are_shown(http: httpx.AsyncClient, says: Any) -> None:
    says("<think>\nHm.\n</think>\n\nSo.")
    thoughts, _ = (await post(http, MESSAGES, max_tokens=99, thinking={"type": "adaptive", "display": "updates"}))[
        "content"
    ]
    assert thoughts["thinking"] == "Hm."


@pytest.mark.parametrize("path", PATHS)
async def test_what_must_hold_the_answer_does(http: httpx.AsyncClient, peers: Peers, path: str) -> None:
    for name, (said, expected) in HELD.items():
        await post(http, path, **{name: said}, x="x" * (LARGE if name == "guided_regex" else 0))
        assert peers.decode.seen[-1].sampling.grammar == expected
        assert "guided_json" in str(await refusal(http, path, guided_json=SCHEMA, structured_outputs={"regex": "a"}))
    assert "structured_outputs" in str(await refusal(http, path, structured_outputs={"regex": 5}))


async def test_responses_that_cannot_be_as_asked_are_refused(http: httpx.AsyncClient) -> None:
    compacted = [{"type": "compaction", "compact_threshold": 1000}]
    param, _ = await refusal(http, RESPONSES, context_management=compacted)
    assert param == "context_management"
    for name, ours in (("response_format", "text.format"), ("max_completion_tokens", "max_output_tokens")):
        param, message = await refusal(http, RESPONSES, **{name: {"type": "json_object"}})
        assert param == name
        assert ours in message
    form = {"format": {"type": "json_object"}}
    _, message = await refusal(http, RESPONSES, text=form, guided_regex="a")
    assert message.startswith("text.format and guided_regex ")


# --- documents ---


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


async def test_documents_of_text_are_shown(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "All is well."}
    parts = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    search = {"type": "search_result", "source": "http://x", "title": "X", "content": [{"type": "text", "text": "c"}]}
    about = {"title": "Report", "context": "of May", "citations": {"enabled": True}}
    seen = says("ok")
    template(gateway, TEMPLATE)
    used = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [document(parts), search]}
    await post(http, MESSAGES, messages=[
        {"role": "user", "content": [document(text, **about), {"type": "text", "text": "So?"}]},
        {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]},
    ])  # fmt: skip
    assert prompt_in(seen, tokenizer).startswith(
        "<user><document>\n<title>Report</title>\n<context>of May</context>\nAll is well.\n</document>\nSo?\n"
        "<assistant>read{}\n<tool><document>\na\nb\n</document>\n"
        "<search_result>\n<title>X</title>\n<source>http://x</source>\nc\n</search_result>\n"
    )


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (document({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}), "source.type"),
        (document({"type": "url", "url": "http://x"}), "source.type"),
        (document(None), "source.type"),
        (document({"type": "text", "data": 5}), "source.data"),
        (document({"type": "content", "content": [{"type": "image"}]}), "source.content[0].type"),
        (document({"type": "text", "data": "x"}, title=5), "title"),
        ({"type": "search_result", "content": 5}, "content"),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_other_documents_are_refused(http: httpx.AsyncClient, block: dict[str, Any], named: str) -> None:
    for content, where in (
        ([block], "messages[0].content[0]"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": [block]}], "messages[0].content[0].content[0]"),
    ):
        message = await refusal(http, MESSAGES, messages=[{"role": "user", "content": content}])
        assert f"{where}.{named}" in message


# --- histories ---

SOURCE = {"type": "text", "media_type": "text/plain", "data": "Page."}
ANTHROPICS: list[tuple[dict[str, Any], str]] = [
    ({"type": "redacted_thinking", "data": "x"}, ""),
    ({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}, ""),
    ({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
        {"type": "web_search_result", "url": "http://x", "title": "X", "encrypted_content": "secret"}]},
     "[result of web_search]\nX\nhttp://x"),
    ({"type": "web_search_tool_result", "content": {"type": "web_search_tool_result_error", "error_code": "late"}},
     "[result of web_search]\nlate"),
    ({"type": "web_fetch_tool_result", "content": {
        "type": "web_fetch_result", "url": "http://x", "content": document(SOURCE, title="X")}},
     "[result of web_fetch]\nhttp://x\nX\nPage."),
    ({"type": "code_execution_tool_result", "content": {"type": "code_execution_result", "stdout": "4", "content": []}},
     "[result of code_execution]\n4"),
    ({"type": "mcp_tool_use", "id": "m", "name": "echo", "server_name": "s", "input": {}}, ""),
    ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "hey"}]},
     "[result of mcp]\nhey"),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "compaction", "content": "So far."}, "[result of compaction]\nSo far."),
    ({"type": "new_in_2030", "x": [{}]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("block", "shown"), ANTHROPICS, ids=lambda value: str(value)[:60])
async def test_blocks_that_anthropics_server_made(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer, block: dict[str, Any], shown: str
) -> None:
    seen = says("ok")
    template(gateway, TEMPLATE)
    text = {"type": "text", "text": "Well."}
    await post(http, MESSAGES, messages=[USER, {"role": "assistant", "content": [block, text]}, USER])
    assert prompt_in(seen, tokenizer).startswith(f"<user>hi\n<assistant>{shown}{shown and chr(10)}Well.\n<user>hi\n")


LOGS = [{"type": "logs", "logs": "4"}, {"type": "image", "url": "data:image/png;base64,x"}]
ANSWERED = {"role": "assistant", "type": "message", "id": 7, "status": "completed", "phase": "final_answer"}
OPENAIS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}}], ""),
    ([{"type": "file_search_call", "results": [{"filename": "a.txt", "text": "A.", "score": 1}]}],
     "<assistant>[result of file_search]\na.txt\nA.\n"),
    ([{"type": "code_interpreter_call", "code": "2+2", "container_id": "c", "outputs": LOGS}],
     "<assistant>[result of code_interpreter]\n2+2\n4\n"),
    ([{"type": "image_generation_call", "result": "iVBOR"}], ""),
    ([{"type": "mcp_list_tools", "server_label": "s", "tools": []},
      {"type": "mcp_approval_request", "name": "f", "arguments": "{}"},
      {"type": "mcp_approval_response", "approve": True},
      {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "hey", "error": None}],
     "<assistant>[result of mcp]\nhey\n"),
    ([{"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
      {"type": "local_shell_call_output", "id": "c", "output": '{"output": "x"}'}],
     '<assistant>local_shell{"type": "exec", "command": ["ls"]}\n<tool>{"output": "x"}\n'),
    ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": "y", "outcome": {}}]}],
     '<assistant>shell{"commands": ["ls"]}\n<tool>x\ny\n'),
    ([{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "x"}},
      {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}],
     '<assistant>apply_patch{"type": "delete_file", "path": "x"}\n<tool>\n'),
    ([{"type": "computer_call", "call_id": "c", "action": {"type": "click"}, "pending_safety_checks": []},
      {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "file_id": "f"}}],
     '<assistant>computer{"type": "click"}\n<tool>\n'),
    ([{"type": "compaction", "encrypted_content": "x"}, {"type": "new_in_2030", "content": "x"}], ""),
    ([{"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
      {**ANSWERED, "content": [{"type": "output_text", "text": "So.", "annotations": [{"type": "url_citation"}],
                                "logprobs": []}, {"type": "output_image"}, {"type": "refusal", "refusal": "No."}]}],
     "<assistant>(Hm.)So.\nNo.\n"),
    ([{"type": "reasoning", "summary": [], "content": None}, {**ANSWERED, "content": None}], "<assistant>\n"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "shown"), OPENAIS, ids=lambda value: str(value)[:60])
async def test_items_that_openais_server_made(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer, items: list[Any], shown: str
) -> None:
    seen = says("ok")
    template(gateway, TEMPLATE)
    await post(http, RESPONSES, input=[USER, *items, USER], store=False)
    again = USER if shown else {"role": "user", "content": "hi\nhi"}
    before = f"<user>hi\n{shown}" if shown else ""
    assert prompt_in(seen, tokenizer).startswith(f"{before}<user>{again['content']}\n")


async def test_what_is_to_be_answered_must_be_known(http: httpx.AsyncClient) -> None:
    for items, param in (
        ([USER, {"type": "new_in_2030"}], "input[1].type"),
        ([USER, {"type": 5}, USER], "input[1].type"),
        ([{"type": "item_reference", "id": "msg_1"}, USER], "input[0].type"),
        ([{"type": "web_search_call"}], "input"),
    ):
        assert (await refusal(http, RESPONSES, input=items))[0] == param


async def test_messages_of_other_chats(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    call = {"name": "weather", "arguments": '{"city": "Lund"}'}
    parts = [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "Warm."}]
    said = [
        USER,
        {"role": "assistant", "content": "", "function_call": call, "annotations": [{"type": "url_citation"}]},
        {"role": "function", "name": "weather", "content": "12"},
        {"role": "assistant", "content": parts, "reasoning_content": "Hm.", "name": "a"},
        USER,
        {"role": "assistant", "content": None, "audio": {"id": "audio_1", "transcript": "Spoken."}},
        USER,
        {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
        USER,
    ]
    seen = says("ok")
    template(gateway, TEMPLATE)
    await post(http, CHATS, messages=said)
    assert prompt_in(seen, tokenizer).startswith(
        '<user>hi\n<assistant>weather{"city": "Lund"}\n<tool>12\n<assistant>(Hm.)'
    )
    assert "<assistant>Spoken.\n<user>hi\n<assistant>\n<user>hi\n<assistant>" in prompt_in(seen, tokenizer)
    for wrong in (5, {"name": "f"}, {"name": "f", "arguments": {}}):
        param, _ = await refusal(http, CHATS, messages=[USER, {"role": "assistant", "function_call": wrong}, USER])
        assert param == "messages[1].function_call"

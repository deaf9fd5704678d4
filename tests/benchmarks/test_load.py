from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import Job, LoadClient, PeerError, closed_loop, in_batches, open_loop, read_answer
from benchmarks.results import TimedAnswer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}


def chunked(*events: dict[str, Any]) -> bytes:
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, **fields}]}


@given(st.lists(st.integers(1, 500)))
def test_an_answer_reads_the_same_wherever_its_bytes_were_cut(cuts: list[int]) -> None:
    data = chunked(*(said(str(i), token_ids=[i]) for i in range(4)), USAGE)
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    answer = read_answer(0.0, [(float(b), data[a:b]) for a, b in pairwise(edges)])
    assert (answer.tokens, len(answer.arrivals), answer.prompt_tokens) == (4, 4, 7)
    assert answer.done <= len(data)


def test_token_ids_are_counted_where_the_server_sends_them() -> None:
    answer = read_answer(0.0, [(1.0, chunked(said("a", token_ids=[1, 2, 3]), said("b", token_ids=[4]), USAGE))])
    assert [arrival.tokens for arrival in answer.arrivals] == [3, 1]


def test_usage_is_shared_among_chunks_where_ids_are_not_sent() -> None:
    answer = read_answer(0.0, [(1.0, chunked(said("a"), said("b"), USAGE))])
    assert [arrival.tokens for arrival in answer.arrivals] == [2, 2]


def test_a_last_chunk_that_only_says_why_it_ended_is_no_token() -> None:
    end = said("", finish_reason="length")
    answer = read_answer(0.0, [(1.0, chunked(*(said(c) for c in "abcd"), end, USAGE))])
    assert [arrival.tokens for arrival in answer.arrivals] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nno workers", "503 Service Unavailable: no workers"),
        (chunked(said("a"), {"error": {"message": "worker lost"}}), "worker lost"),
        (chunked(said("a")), "without tokens and usage"),
        (b"", "ended before an answer"),
    ],
)
def test_what_is_no_answer_is_an_error_that_says_so(data: bytes, complaint: str) -> None:
    with pytest.raises(PeerError, match=complaint):
        read_answer(0.0, [(1.0, data)])


async def test_a_real_server_answers_as_many_tokens_as_asked(server: LoadClient) -> None:
    answers = await closed_loop(server, [Job(range(300, 310 + i), 3 + i) for i in range(5)], concurrency=3)
    assert [(round(a.tokens), a.prompt_tokens) for a in answers] == [(3 + i, 10 + i) for i in range(5)]
    assert all(answer.ttft > 0 and min(answer.gaps, default=0.0) >= 0 for answer in answers)


async def test_a_real_servers_complaint_is_passed_on(server: LoadClient) -> None:
    with pytest.raises((PeerError, OSError)):
        await LoadClient(server.url, "no-such-model").send(Job([], 4))


async def test_open_loop_waits_for_arrivals_and_not_for_answers(server: LoadClient) -> None:
    jobs = [Job(range(300, 310), 40, at=at) for at in (0.0, 0.0, 0.3)]
    began = time.perf_counter()
    first, second, late = await open_loop(server, jobs)
    assert late.sent - began >= 0.3
    assert second.sent < first.done


async def test_a_static_batch_waits_for_the_one_before(server: LoadClient) -> None:
    answers = await in_batches(server, [Job(range(300, 310), 2 + 6 * (i % 2)) for i in range(4)], size=2)
    assert min(sent(answers[2:])) >= max(answer.done for answer in answers[:2])


def sent(answers: list[TimedAnswer]) -> list[float]:
    return [answer.sent for answer in answers]

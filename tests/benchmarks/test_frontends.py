"""The clients and the backends of `benchmarks.gateway`, with nothing between them."""

from benchmarks.frontends.byte_server import byte_server
from benchmarks.frontends.clients import StreamLoad
from benchmarks.frontends.pace import BackendPace


async def test_every_token_is_counted_and_timed() -> None:
    pace = BackendPace()
    pace.step_s = 0.01
    async with byte_server(pace) as port:
        seen = await StreamLoad(port, "demo", pace).run(count=10, tokens=7, at_once=4)
    assert len(seen.answers) == 10
    assert seen.num_tokens() == 70
    delays = seen.delays_ms(pace)
    assert len(delays) == 60
    assert min(delays) > 0
    assert seen.ttft_ms(50) > 0


async def test_without_a_step_backends_go_as_fast_as_clients_read() -> None:
    pace = BackendPace()
    async with byte_server(pace) as port:
        seen = await StreamLoad(port, "demo", pace).run(count=6, tokens=50, at_once=6)
    assert seen.num_tokens() == 300
    assert seen.tokens_an_event() == 1

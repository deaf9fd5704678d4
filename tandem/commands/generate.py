"""`tandem generate "def "`: stream an answer to the terminal, over gRPC like any other client."""

from __future__ import annotations

import asyncio
import sys

from grpc import aio
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem import rpc
from tandem.commands import CONTROLS
from tandem.settings import Settings, load
from tandem.v1 import llm_pb2, llm_pb2_grpc


class GenerateSettings(Settings):
    """Stream an answer from a running cluster to the terminal."""

    prompt: CliPositionalArg[str] = Field(description="text to continue, or with --chat what to say")
    address: str = Field("127.0.0.1:50051", description="the gateway's gRPC address")
    api_key: str = Field("", description="as `tandem keys add` printed it, where the gateway asks for one")
    model: str = Field("", description="if not given, the first model that the gateway serves")
    chat: bool = Field(False, description="send the prompt as a user's message, in the model's chat template")
    max_tokens: int = Field(128, ge=1, description="most tokens of the answer")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; if not given, the model's own")
    top_p: float | None = Field(None, ge=0, le=1, description="sample from the likeliest tokens of this mass")
    stop: tuple[str, ...] = Field((), description="end before this text; may be given several times")
    seed: int | None = Field(None, ge=0, description="equal seeds give equal answers")
    timeout_s: float = Field(120.0, gt=0, description="bound of the whole answer")

    def request(self) -> llm_pb2.GenerateRequest:
        sampling = llm_pb2.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, stop=self.stop, seed=self.seed
        )
        request = llm_pb2.GenerateRequest(model=self.model, sampling=sampling)
        if self.chat:
            request.messages.messages.add(role="user", content=self.prompt)
        else:
            request.prompt = self.prompt
        return request


def main(arguments: list[str]) -> None:
    try:
        asyncio.run(run(arguments))
    except aio.AioRpcError as error:
        raise SystemExit(f"{error.code().name}: {error.details()}") from None


async def run(arguments: list[str]) -> None:
    """Raises aio.AioRpcError when the cluster refuses or fails."""
    settings = load(GenerateSettings, arguments, "tandem generate")
    key = (("authorization", f"Bearer {settings.api_key}"),) if settings.api_key else ()
    async with rpc.channel(settings.address) as channel:
        service, request = llm_pb2_grpc.LLMServiceStub(channel), settings.request()
        if not request.model:
            found = await service.ListModels(llm_pb2.ListModelsRequest(), timeout=settings.timeout_s, metadata=key)
            if not found.models:
                raise SystemExit("the gateway serves no model")
            request.model = found.models[0].id
        before, hidden = request.prompt, CONTROLS if sys.stdout.isatty() else {}
        try:
            async for response in service.Generate(request, timeout=settings.timeout_s, metadata=key):
                print(before + response.text.translate(hidden), end="", flush=True)
                before = ""
        finally:
            if before != request.prompt or settings.chat:
                print()
        print(describe(response), file=sys.stderr)


def describe(last: llm_pb2.GenerateResponse) -> str:
    """Returns one line: what the answer cost, and its path."""
    usage, path = last.usage, last.path
    workers = f"{path.prefill_worker} -> {path.decode_worker}" if path.prefill_worker else path.decode_worker
    return (
        f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached, {usage.completion_tokens} new; "
        f"{workers}; {path.transfer_bytes:,} KV bytes moved{' over ' + path.transport if path.transport else ''}]"
    )

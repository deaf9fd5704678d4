"""A model whose files misbehave is unserved by name, or its requests fail: other models never notice.

What is measured is as in test_worst_bodies: what this process, the gateway among it, computes between two tokens of
another model's answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import Gateway, GatewaySettings
from services.gateway.directory.roster import RETRY_S
from services.gateway.model import ModelHelper
from services.gateway.untrusted import ChatTemplate
from tandem.containment import Bounds
from tandem.local import RedisServer
from tandem.registry import Registry, WorkerLoad
from tests.gateway.conftest import OTHER, eventually, joined, make_settings
from tests.gateway.peers import MODEL, Peers, folder_of, peers_on
from tests.gateway.test_worst_bodies import Bystander, bystander

__all__ = ["bystander"]  # a fixture
CONTEXT = 4096
MOST_S = 0.3
LOAD = WorkerLoad(free_blocks=64, num_waiting=0, num_running=0, queued_tokens=0, linked=())
# What does harm in a template, whatever it is for.
HARMS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (messages | length + 8) ** (9 ** 9) }}",
    "a list that doubles": """\
{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}""",
    "a text that is long": "{{ 'x' * 10 ** 11 }}",
    "a filter": "{{ 'x' | center(10 ** 11) }}",
    "much text": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "lists in lists": """\
{% set ns = namespace(x=['x']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}\
{{ ns.x | tojson }}""",
}
# These harm nobody once they are bounded, or are refused as they are compiled.
FAULTS = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "what is raised": "{{ raise_exception('x' * 9999) }}",
}
REFUSED = {
    "a constant power": "{{ 9 ** (9 ** 9) }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "blocks in blocks": "{% if true %}" * 500 + "{% endif %}" * 500,
    "no end": "{% for m in messages %}",
    "a length": "{# " + "x" * 2**20 + " #}",
}
HARMED = HARMS | FAULTS
SHOWN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def patterns(regex: str) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, said["pre_tokenizer"]]}

    return change


def many_tokens(said: dict[str, Any]) -> None:
    one = said["added_tokens"][0]
    said["added_tokens"] += [{**one, "id": 400 + i, "content": f"<{i}>"} for i in range(300_000)]


FILES: dict[str, dict[str, Any]] = {
    "a pattern that is none": {"tokenizer": patterns("(")},
    "more added tokens than anyone has": {"tokenizer": many_tokens},
    "depth": {"tokenizer": "[" * 10**6},
    "no object": {"generation_config": "[]"},
    "another kind": {"generation_config": '{"eos_token_id": "x"}'},
    "a number beyond all": {"generation_config": '{"eos_token_id": 1' + "0" * 5000 + "}"},
    "nothing": {"generation_config": "null"},
    "a token that is none": {"tokenizer_config": '{"added_tokens_decoder": {"x": 3}}'},
    "deep configuration": {"tokenizer_config": '{"a":' * 10**5 + "1" + "}" * 10**5},
}


@pytest.fixture
async def settings(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    monkeypatch.setattr("services.gateway.server.PREFILL_QUEUE_TOKENS", 2**24)
    return make_settings(redis)


@asynccontextmanager
async def served(settings: GatewaySettings, name: str, folder: Path, tokens: list[int]) -> AsyncIterator[Peers]:
    """A decode worker of a model with these files."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, lambda spec: tokens) as peers:
        peers.model, peers.folder, peers.max_model_len = name, folder, CONTEXT
        await peers.add_decode(f"{name}-d", num_blocks=2**20)
        await peers.add_prefill(f"{name}-p")
        yield peers


@pytest.fixture
async def peers(settings: GatewaySettings) -> AsyncIterator[Peers]:
    async with served(settings, MODEL, folder_of(CONTEXT), [5] * 5_000) as peers:
        yield peers


def changed(folder: Path, to: Path, **files: str | Callable[[dict[str, Any]], None]) -> Path:
    """Returns a folder with some files changed: by another text, or by a function of what JSON says."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    for name, change in files.items():
        file = to / (f"{name}.jinja" if name == "chat_template" else f"{name}.json")
        if isinstance(change, str):
            file.write_text(change, encoding="utf-8")
        else:
            said = json.loads(file.read_text(encoding="utf-8"))
            change(said)
            file.write_text(json.dumps(said), encoding="utf-8")
    return to


async def unserved(gateway: Gateway, name: str) -> str:
    """Returns why a model is not served, once that is known."""
    await eventually(lambda: any(f"model {name}:" in why for why in gateway.directory.problems.values()))
    assert name not in gateway.directory.names
    return next(why for why in gateway.directory.problems.values() if f"model {name}:" in why)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends what runs for ever sooner than it would be for users."""
    monkeypatch.setattr("services.gateway.model.rendering.LIMITS", Bounds(0.4, 10.0, 2**27))


@pytest.mark.alone
async def test_templates_that_harm_are_never_served(
    gateway: Gateway, bystander: Bystander, settings: GatewaySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is tried once."""
    tried = list[ChatTemplate]()
    checked = ModelHelper.checked

    async def note(self: ModelHelper, template: ChatTemplate) -> ChatTemplate:
        tried.append(template)
        return await checked(self, template)

    monkeypatch.setattr(ModelHelper, "checked", note)
    async with AsyncExitStack() as stack:
        for i, source in enumerate((HARMS | REFUSED).values()):
            folder = changed(folder_of(CONTEXT), tmp_path / str(i), chat_template=source + SHOWN)
            await stack.enter_async_context(served(settings, f"bad-{i}", folder, [5]))
        for i, name in enumerate(HARMS | REFUSED):
            why = await bystander.beside(unserved(gateway, f"bad-{i}"))
            assert "chat_template: " in why, name
            assert len(why) < 1000, name
            assert bystander.late_s < MOST_S, name
        await asyncio.sleep(2 * RETRY_S)
    assert max(Counter(template.source for template in tried).values()) == 1


@pytest.mark.alone
async def test_messages_for_which_a_template_harms_fail_alone(
    gateway: Gateway, bystander: Bystander, http: httpx.AsyncClient, settings: GatewaySettings, tmp_path: Path
) -> None:
    said = "".join(f"{{% if messages[0].content == '{name}' %}}{harm}{{% endif %}}" for name, harm in HARMED.items())
    folder = changed(folder_of(CONTEXT), tmp_path / "bad", chat_template=said + SHOWN)
    async with served(settings, OTHER, folder, [5]):
        await joined(gateway)

        async def ask(content: str, model: str = OTHER) -> httpx.Response:
            chat = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return await http.post("/v1/chat/completions", json=chat)

        for name in HARMED:
            asked = asyncio.gather(ask(name), ask("hello"), ask(name), ask("hello", MODEL))
            bad, good, again, others = await bystander.beside(asked)
            assert [one.status_code for one in (bad, good, again, others)] == [400, 200, 400, 200], name
            assert "messages: the model's chat template " in bad.json()["error"]["message"]
            assert len(bad.text) < 1000
            assert bystander.late_s < MOST_S, name


@pytest.mark.alone
async def test_files_that_harm_are_never_served(
    gateway: Gateway, bystander: Bystander, settings: GatewaySettings, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        for i, files in enumerate(FILES.values()):
            folder = changed(folder_of(CONTEXT), tmp_path / str(i), **files)
            await stack.enter_async_context(served(settings, f"bad-{i}", folder, [5]))
        for i, name in enumerate(FILES):
            why = await bystander.beside(unserved(gateway, f"bad-{i}"))
            assert ".json: " in why, name
            assert len(why) < 2000, name
            assert bystander.late_s < MOST_S, name


@pytest.mark.alone
async def test_a_pattern_that_does_not_end_harms_its_own_texts_alone(
    gateway: Gateway, bystander: Bystander, http: httpx.AsyncClient, settings: GatewaySettings, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One pattern fails after ten million tries; the other succeeds, after a million for each character."""
    monkeypatch.setattr("services.gateway.text.tokenizer.MOST_S", 0.3)
    short, row = {"prompt": "hello"}, "a" * 40 + "b"
    slow: dict[str, list[dict[str, Any]]] = {
        "(a+)+$": [{"prompt": row}, {"prompt": row * 200}, {"prompt": [row]}, {"prompt": "x", "bad_words": [row]}],
        "a{0,600}a{0,600}c|a": [{"prompt": "a" * 3500}, {"prompt": "a" * 4500}],
    }
    async with AsyncExitStack() as stack:
        for i, (regex, bodies) in enumerate(slow.items()):
            folder = changed(folder_of(CONTEXT), tmp_path / str(i), tokenizer=patterns(regex))
            await stack.enter_async_context(served(settings, f"slow-{i}", folder, [5]))
            await joined(gateway, f"slow-{i}")
            assert (await http.post("/v1/completions", json={"model": f"slow-{i}", **short})).status_code == 200
            asked = [http.post("/v1/completions", json={"model": f"slow-{i}", **body}) for body in bodies]
            other = http.post("/v1/completions", json={"model": MODEL, **short})
            *bad, good = await bystander.beside(asyncio.gather(*asked, other))
            assert good.status_code == 200
            for answer in bad:
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tokenizer_failed"), answer.text
            assert bystander.late_s < MOST_S, regex


async def test_fingerprints_of_another_shape_are_refused_by_name(
    gateway: Gateway, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked for, or removed, under such a name."""
    removed = list[object]()
    monkeypatch.setattr("tandem.checkpoints.text_files.shutil.rmtree", lambda *args, **_: removed.append(args))
    known = peers.workers[f"{MODEL}-d"].info
    for i, fingerprint in enumerate(["..", "../../x", "/etc", "x" * 32, "A" * 32, "a" * 64, "\0", "a\n"]):
        odd = replace(known, worker_id=f"odd-{i}", incarnation=f"{i:032x}", fingerprint=fingerprint, model=OTHER)
        await peers.registry.leases.register(odd, LOAD, 30.0)
        await eventually(lambda name=f"odd-{i}": "no fingerprint" in gateway.directory.problems.get(name, ""))
    assert gateway.directory.names == [MODEL]
    assert removed == []

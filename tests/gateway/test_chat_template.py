from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.gateway.model import read_template
from services.gateway.untrusted import ChatTemplate, TemplateRefused

MESSAGES = [{"role": "user", "content": "Hi <b> 狐"}]


def rendered(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 1, 2, tzinfo=UTC)).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>Hi <b> 狐"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b> 狐"}]'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% if add_generation_prompt %}<assistant>{% endif %}", "<assistant>"),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
    ],
)
def test_renders_as_hugging_face_does(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[3].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_the_template_refuses_is_one_error(source: str) -> None:
    with pytest.raises(TemplateRefused):
        rendered(source)


def test_the_reason_is_kept() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_the_file_beside_wins_over_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = read_template(tmp_path)
    assert template is not None
    assert template.render([]) == "config </s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    template = read_template(tmp_path)
    assert template is not None
    assert template.render([]) == "file </s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}), encoding="utf-8")
    template = read_template(tmp_path)
    assert template is not None
    assert template.render([]) == "plain"


def test_a_model_may_have_none(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None


def test_equal_to_transformers(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    ours = read_template(demo_model)
    assert ours is not None
    theirs = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "system", "content": "a\n b"}, {"role": "user", "content": "ü {{ x }}"}]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

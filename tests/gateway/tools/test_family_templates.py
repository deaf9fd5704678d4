"""Each family's template, small and as published, shows a chat and its calls; or no calls, which then can be forced."""

from __future__ import annotations

import pytest

from services.gateway.errors import InvalidRequest
from services.gateway.tools import FORMATS, TAGS, detect_format, detect_tags, plan_reading, read_tools
from services.gateway.tools.forced import ForcedCalls, NamedCall
from services.gateway.untrusted import ChatTemplate, TemplateOptions, TemplateRefused
from tandem.checkpoints import FAMILIES
from tests.gateway.tools import templates
from tests.gateway.tools.templates import OF_FAMILIES
from tests.gateway.tools.test_calls import TOOLS

pytestmark = pytest.mark.fast
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "again"},
]  # fmt: skip
CALLED = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Malmö"}}}
    ]},
    {"role": "tool", "content": "rain", "tool_call_id": "a"},
]  # fmt: skip
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
)
GLM = "[gMASK]<sop><|system|>\nBe brief.<|user|>\nhi<|assistant|>\nHello.<|user|>\nagain<|assistant|>"
GEMMA = "\n\nhi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n<start_of_turn>user\nagain<end_of_turn>\n"
PROMPTS = {
    templates.LLAMA31: "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Hello.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nagain<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    templates.MISTRAL3: "<s>[INST] hi[/INST] Hello.</s>[INST] Be brief.\n\nagain[/INST]",
    templates.QWEN25: CHATML,
    templates.QWEN3: CHATML,
    templates.PHI4_MINI: "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>Hello.<|end|><|user|>again<|end|>"
    "<|assistant|>",
    templates.OLMO2: "<s><|system|>\nBe brief.\n<|user|>\nhi\n<|assistant|>\nHello.</s>\n<|user|>\nagain\n"
    "<|assistant|>\n",
    templates.GRANITE: "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Hello.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>again<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    templates.SMOLLM3: CHATML.replace("Be brief.", "## Custom Instructions\n\nBe brief.\n\n"),
    templates.GLM4_CHAT: GLM,
    templates.GLM4: GLM,
    templates.GEMMA3: f"<s><start_of_turn>user\nBe brief.{GEMMA}<start_of_turn>model\n",
    templates.COMMAND_R: "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>again<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    templates.HARMONY: "# Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello.<|end|><|start|>user<|message|>again<|end|><|start|>assistant",
    templates.DEEPSEEK_V2: "<s>Be brief.\n\nUser: hi\n\nAssistant: Hello.</s>User: again\n\nAssistant:",
    templates.DEEPSEEK_V31: "<s>Be brief.<｜User｜>hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>"
    "<｜User｜>again<｜Assistant｜></think>",
}
# The calls of those that tests/gateway/tools/test_families.py does not show.
CALLS = {
    templates.LLAMA31: '<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Malmö"}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>',
    templates.MISTRAL3: '[/AVAILABLE_TOOLS][INST] hi[/INST][TOOL_CALLS] [{"name": "weather", "arguments": '
    '{"city": "Malmö"}, "id": "a"}]</s>[TOOL_RESULTS] {"content": rain, "call_id": "a"}[/TOOL_RESULTS]',
    templates.QWEN25: '<tool_call>\n{"name": "weather", "arguments": {"city": "Malmö"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
}


@pytest.mark.parametrize(("template", "prompt"), PROMPTS.items())
def test_a_chat_is_shown_as_published(template: str, prompt: str) -> None:
    made = ChatTemplate(template, TOKENS)
    assert made.render([SYSTEM, *TURNS]).endswith(prompt)
    assert "Be brief." not in made.render(TURNS)


def test_gemma_2_has_no_system_and_says_so() -> None:
    made = ChatTemplate(templates.GEMMA2, TOKENS)
    assert made.render(TURNS) == f"<s><start_of_turn>user{GEMMA[1:]}<start_of_turn>model\n"
    assert not made.facts.takes_system
    with pytest.raises(TemplateRefused, match="System role not supported"):
        made.render([SYSTEM, *TURNS])


@pytest.mark.parametrize(("template", "shown"), CALLS.items())
def test_a_call_and_its_result_are_shown_as_published(template: str, shown: str) -> None:
    prompt = ChatTemplate(template, TOKENS).render(CALLED, TemplateOptions(tools=TOOLS))
    assert shown in prompt
    assert prompt.index(TOOLS[1]["function"]["name"]) < prompt.index("Malmö")  # type: ignore[index]


def test_a_thought_of_qwen3_is_opened_by_the_model_and_closed_by_the_prompt() -> None:
    made, none = ChatTemplate(templates.QWEN3, TOKENS), TemplateOptions(variables={"enable_thinking": False})
    assert made.render(TURNS, none) == made.render(TURNS) + "<think>\n\n</think>\n\n"
    assert TAGS[detect_tags(templates.QWEN3) or ""].opened_by(made.render(TURNS)) is False


@pytest.mark.parametrize("family", [one for one, (_, template) in OF_FAMILIES.items() if not detect_format(template)])
def test_calls_that_no_template_shows_can_be_forced_and_are_refused_else(family: str) -> None:
    """Nor does such a template show a call and its result of before."""
    template = OF_FAMILIES[family][1]
    try:
        shown = ChatTemplate(template, TOKENS).render(CALLED, TemplateOptions(tools=TOOLS))
    except TemplateRefused as error:
        shown = str(error)
        assert "roles must alternate" in shown
    assert "weather" not in shown
    assert "rain" not in shown
    for choice, reader in (("required", ForcedCalls), ({"type": "function", "function": {"name": "time"}}, NamedCall)):
        plan = plan_reading(None, None, read_tools(TOOLS, choice, None), "")
        assert plan is not None
        assert plan.calls is reader
    found = FORMATS.get(detect_format(template) or "")
    with pytest.raises(InvalidRequest, match="its chat template shows no format of calls"):
        plan_reading(None, found, read_tools(TOOLS, "auto", None), "")


def test_each_family_has_a_template() -> None:
    assert tuple(OF_FAMILIES) == FAMILIES
    assert {template for _, template in OF_FAMILIES.values()} == {*PROMPTS, templates.GEMMA2}

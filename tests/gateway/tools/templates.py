"""Chat templates of families, small, as their formats are published."""

HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>
{%- set first = messages[0] if messages[0].role == 'system' else none %}
{%- if first or tools %}<|start|>developer<|message|>
    {%- if first %}{{ '# Instructions\n\n' + first.content + '\n\n' }}{% endif %}
    {%- if tools %}{{ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: ' }}
            {{- tool.function.parameters | default({}) | tojson }}{{ ') => any;\n\n' }}
        {%- endfor %}} // namespace functions
    {%- endif %}<|end|>
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages[1 if first else 0:] %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
        {%- set thought = message.thinking or message.content %}
        {%- if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}<|call|>
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{ raise_exception('a result of no call') }}{% endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}<|end|>
    {%- elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

DEEPSEEK_V3 = """\
{{ bos_token }}
{%- for message in messages if message['role'] == 'system' %}{{ message['content'] }}{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}<｜Assistant｜><｜tool▁calls▁begin｜>
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' }}
            {{- tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1]['role'] != 'tool' %}<｜Assistant｜><think>\n{% endif %}"""

DEEPSEEK_V31 = """\
{{ bos_token }}
{%- for message in messages if message['role'] == 'system' %}{{ message['content'] }}{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] + '<｜Assistant｜></think>' }}{% endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- for tool in message['tool_calls'] %}
            {%- if not loop.first %}<｜tool▁call▁begin｜>
            {%- elif message['content'] is none %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>
            {%- else %}{{ message['content'] + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}{% endif %}
            {{- tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
        {%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
    {%- elif message['role'] == 'assistant' %}{{ message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}"""

GLM4 = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# 可用工具
    {%- for tool in tools %}
        {{- '\n\n## ' + tool.function.name + '\n\n' + tool.function | tojson(indent=4, ensure_ascii=False) }}
        {{- '\n在调用上述函数时，请使用 Json 格式表示调用的参数。' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set meta = message.get("metadata", "") %}
    {%- if message.role in ['system', 'user', 'observation'] or (message.role == 'assistant' and not meta) %}
        {{- '<|' + message.role + '|>\n' + message.content }}
    {%- elif message.role == 'assistant' %}{{ '<|assistant|>' + meta + '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

GLM4_CHAT = """\
[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>
# 可用工具{% for tool in item['tools'] %}

## {{ tool['function']['name'] }}
在调用上述函数时，请使用 Json 格式表示调用的参数。{% endfor %}{% endif %}
{%- if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}
{{ item['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

GRANITE = """\
{%- if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You are Granite.
    {%- if tools %} To use a tool, respond with <|tool_call|> and a JSON list of the tools used.{% endif %}
    {%- if thinking %} Think between <think></think>, and answer between <response></response>.{% endif %}
    {{- '<|end_of_text|>\n' }}
{%- endif %}
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson + '<|end_of_text|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

PHI4_MINI = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
    {%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

SMOLLM3 = """\
<|im_start|>system
{% if messages[0].role == 'system' %}{{ '## Custom Instructions\n\n' + messages[0].content + '\n\n' }}{% endif %}
{%- if xml_tools %}<tools>
{% for tool in xml_tools[:] %}{{ tool | string }}
{% endfor %}</tools>
Return a JSON object within <tool_call></tool_call> for each call.
{% endif %}<|im_end|>
{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role in ['user', 'tool'] %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}{% endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set said = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools %}{{ "Environment: ipython\n" }}{% endif %}
{{- said + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content | tojson + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("only single tool-calls at once") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if tools and loop.first %}
            {{- 'Respond in the format {"name": function name, "parameters": its arguments}.\n\n' }}
            {%- for tool in tools %}{{ tool | tojson(indent=4) + "\n\n" }}{% endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- else %}{% set said = "" %}{% endif %}
{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + (said if loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}[TOOL_CALLS] [
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}{{ ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Only user and assistant roles are supported, with the exception of tools') }}
    {%- endif %}
{%- endfor %}"""

QWEN25 = """\
{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You are Qwen.') }}
{%- if tools %}
    {{- "\n\n# Tools\n\n<tools>" }}{% for tool in tools %}{{ "\n" + tool | tojson }}{% endfor %}
    {{- '\n</tools>\n\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}{{ '<|im_end|>\n' }}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}{{ '<|im_start|>' + message.role + ('\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls or () %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = (
    QWEN25.replace("'You are Qwen.'", "''")
    + """\
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
{%- endif %}"""
)

OLMO2 = """\
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token }}
{{- '\n' if not loop.last else '' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA3 = """\
{{ bos_token }}
{%- set prefix = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set said = messages[0]['content'] %}
    {%- set prefix = (said if said is string else said[0]['text']) + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- prefix if loop.first else '' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- else %}{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] | trim }}{% endfor %}
    {%- endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

DEEPSEEK_V2 = """\
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}
{%- elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

COMMAND_R = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set said = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}{% set said = false %}{% endif %}
{%- if said %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + said + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if message['role'] == 'user' else '<|CHATBOT_TOKEN|>') }}
    {{- message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# Of each family, by model_type: whose template stands for it.
OF_FAMILIES = {
    "llama": ("Llama 3.1", LLAMA31), "mistral": ("Mistral v0.3", MISTRAL3), "qwen2": ("Qwen2.5", QWEN25),
    "qwen3": ("Qwen3", QWEN3), "phi3": ("Phi-4-mini", PHI4_MINI), "olmo2": ("OLMo 2", OLMO2),
    "granite": ("Granite 3", GRANITE), "smollm3": ("SmolLM3", SMOLLM3), "glm": ("GLM-4-chat", GLM4_CHAT),
    "glm4": ("GLM-4-0414", GLM4), "gemma2": ("Gemma 2", GEMMA2), "gemma3_text": ("Gemma 3", GEMMA3),
    "cohere": ("Command-R", COMMAND_R), "mixtral": ("Mistral v0.3", MISTRAL3),
    "qwen2_moe": ("Qwen2.5", QWEN25), "qwen3_moe": ("Qwen3", QWEN3),
    "gpt_oss": ("gpt-oss", HARMONY), "deepseek_v2": ("DeepSeek V2", DEEPSEEK_V2),
    "deepseek_v3": ("DeepSeek V3.1", DEEPSEEK_V31),
}  # fmt: skip

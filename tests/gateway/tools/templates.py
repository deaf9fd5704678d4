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
{% if xml_tools %}<tools>
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

"""More than forty chat templates of the shapes that models' own have, with the content that each shows."""

from __future__ import annotations

from typing import NamedTuple

from services.gateway.untrusted.probing import Form


class TemplateShape(NamedTuple):
    """`content`: what the template shows of a user's."""

    source: str
    content: Form = "text"


PLAIN = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml with a system of its own": """\
{%- for message in messages %}
    {%- if loop.first and messages[0].role != 'system' %}
        {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "system within the first instruction": """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}\
{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}\
{% else %}{% set content = m['content'] %}{% endif %}\
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "headers of roles": """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "no system allowed": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "instructions by sign": """\
{%- for m in messages if m.role != 'system' -%}
{{ '### Instruction:\n' if m.role == 'user' else '### Response:\n' }}{{ m.content | trim }}{{ '\n\n' if not loop.last }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif -%}""",
    "speakers by name": """\
{% for m in messages %}{{ (m.name | default(m.role)) | title }}: {{ m.content }}{{ '\n' if not loop.last else '' }}\
{% endfor %}{% if add_generation_prompt %}\nAssistant:{% endif %}""",
    "marks of turns": """\
{{ bos_token }}{% for m in messages %}{{ 'GPT4 Correct ' + ('User' if m.role == 'user' else 'Assistant') + ': ' + \
m.content + '<|end_of_turn|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}""",
    "reserved tokens": """\
{%- set marks = {'user': '<reserved_106>', 'assistant': '<reserved_107>', 'system': ''} -%}
{%- for m in messages -%}{{ marks[m['role']] }}{{ m['content'] }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ marks.assistant }}{%- endif -%}""",
    "a macro for each turn": """\
{%- macro turn(role, text, last=false) -%}
<|{{ role }}|>
{{ text }}{{ '' if last else eos_token + '\n' }}
{%- endmacro -%}
{%- for m in messages %}{{ turn(m.role, m.content, loop.last and not add_generation_prompt) }}{% endfor -%}
{%- if add_generation_prompt %}{{ turn('assistant', '', true) }}{% endif -%}""",
    "tabs and lines": "{% for m in messages %}\n\t{% if m.role == 'user' %}\n\tuser >> {{ m.content }}\n"
    "\t{%- else +%}\n\tother >> {{ m.content }}\n\t{%- endif %}\n{% endfor %}\n",
    "a block that is set": """\
{% for m in messages %}{% set turn %}<{{ m.role }}>{{ m.content }}{% endset %}\
{{ turn | length }}:{{ turn }}{% endfor %}""",
    "counted by a namespace": """\
{%- set ns = namespace(users=0, last='') -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}
  {%- set ns.last = m.role -%}
  [{{ ns.users }} {{ m.role }}] {{ m.content }}
{% endfor -%}
{{ 'answer ' ~ ns.users if add_generation_prompt and ns.last == 'user' else '' }}""",
    "a call block": """\
{% macro boxed(role) %}[{{ role }}]{{ caller() }}[/{{ role }}]{% endmacro %}\
{% for m in messages %}{% call boxed(m.role | upper) %}{{ m.content }}{% endcall %}{% endfor %}""",
    "a filter block": """\
{% for m in messages %}{% filter trim | replace('<', '&lt;') %} {{ m.content }} {% endfilter %};{% endfor %}""",
    "groups and sorts": """\
{% for role, turns in messages | groupby('role') %}{{ role }}={{ turns | map(attribute='content') | join('|') }};\
{% endfor %}{{ messages | map(attribute='role') | unique | sort | join(',') }}""",
    "breaks and continues": """\
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}\
{% if loop.index > 3 %}{% break %}{% endif %};{% endfor %}""",
    "raw and comments": """\
{# not shown #}{% raw %}{{ user }}{% endraw %}{% for m in messages %}{{ m.content }}{% endfor %}""",
    "today": "{{ strftime_now('%d %B %Y') }}{% for m in messages %}|{{ m.role }}: {{ m.content }}{% endfor %}",
    "training marks": """\
{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}
{% generation %}{% set said = m.content %}{{ said }}<|end|>{% endgeneration %}
{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "looks at neighbours": """\
{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}{{ '\n' }}{% else %}\
{{ '\n\n' ~ m.role ~ ': ' if not loop.first else m.role ~ ': ' }}{% endif %}{{ m.content }}\
{% if loop.nextitem is not defined %}.{% endif %}{% endfor %}""",
    "joiner and cycler": """\
{% set comma = joiner('; ') %}{% set mark = cycler('-', '+') %}\
{% for m in messages %}{{ comma() }}{{ mark.next() }}{{ m.content }}{% endfor %}""",
    "a macro that calls itself": """\
{% macro turns(rest) %}{% if rest %}<{{ rest[0].role }}>{{ rest[0].content }}{{ turns(rest[1:]) }}\
{% endif %}{% endmacro %}\
{{ turns(messages) }}""",
    "pairs": """\
{% for pair in messages | batch(2, {'role': 'none', 'content': ''}) %}Round {{ loop.index }}
{% for m in pair %}{{ '%s> %s' | format(m.role, m.content) | indent(2) }}
{% endfor %}{% endfor %}""",
    "tokens of its own": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ pad_token }}{% endfor %}"
    "{{ eos_token }}{{ unk_token is defined }}{{ image_token | default('none') }}",
    "documents": """\
{%- if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{% elif documents is defined -%}
no documents {% endif -%}{% for m in messages %}{{ m.content }};{% endfor %}""",
}
TOOLS = {
    "tools before the first turn": """\
{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}\
{%- endif %}{{- "\n\n# Tools\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}\
{{- "\n</tools><|im_end|>\n" }}{%- endif %}
{%- for m in messages %}
  {%- if m.role in ('user', 'assistant') and not m.tool_calls %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
  {%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
    {%- for call in m.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
      {{- '\n<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}
      {{- '}\n</tool_call>' }}{%- endfor %}
  {%- elif m.role == 'tool' %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
    {{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "tools with the last user": """\
{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}
{%- if tools is not none and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] [' }}{%- for t in tools %}
{{- '{"type": "function", "function": {' }}{%- for k, v in t.function.items() if k != 'return' %}
{%- if v is string %}{{- '"' + k + '": "' + v + '"' }}{%- else %}{{- '"' + k + '": ' + v | tojson }}{%- endif %}
{{- ', ' if not loop.last else '}}' }}{%- endfor %}{{- ', ' if not loop.last else ']' }}{%- endfor %}
{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}
{%- set out = c.function | tojson %}{{- out[:-1] }}{{- ', "id": "' + c.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + \
m.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}""",
    "one call a message": """\
{%- for m in messages %}
{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson(indent=2) }}{{- '}<|eom_id|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}{{- '<|ipython|>' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}{%- endfor %}
{%- if tools %}{{- tools | map(attribute='function') | map(attribute='name') | join(' ') }}{%- endif %}""",
    "types for a language": """\
{%- macro kind(p) -%}{%- if p.type == 'object' -%}{ {%- for k, v in p.properties.items() -%}{{ k }}: {{ kind(v) }}
{{- ', ' if not loop.last }}{%- endfor -%} }{%- elif p.type == 'array' -%}{{ kind(p['items']) }}[]
{%- elif p.type == 'integer' -%}number{%- elif p.enum -%}{{ p.enum | map('tojson') | join(' | ') }}
{%- else -%}{{ p.type }}{%- endif -%}{%- endmacro -%}
{%- if tools -%}namespace functions {{ '{' }}{%- for t in tools -%}
{{ '\n// ' ~ t.function.description }}\ntype {{ t.function.name }} = (_: {{ kind(t.function.parameters) }}) => any;
{%- endfor -%}{{ '\n}' }}{%- endif -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(\
{% for k, v in c.function.arguments | dictsort %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})\
{% endfor %}{% endfor %}""",
    "tools as compact json": """\
{{ (tools or []) | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}\
{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}""",
    "a dictionary that grows": """\
{%- set names = dict() -%}{%- for m in messages -%}{%- for c in m.tool_calls or () -%}
{%- set names = dict(names, **{c.id: c.function.name}) -%}{{ names[c.id] }}{%- endfor -%}
{%- if m.role == 'tool' -%}{{ m.tool_call_id }}: {% endif -%}{{ m.content }}
{% endfor -%}""",
}
THOUGHTS = {
    "thoughts of the last turn alone": """\
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.looking and m.role == 'user' and m.content is string and not m.content.startswith('<tool_response>') %}
{%- set ns.looking = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- set thoughts = '' %}
{%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}
{%- elif '</think>' in m.content %}
{%- set thoughts = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
{%- endif %}
{{- '<|' + m.role + '|>' }}{%- if m.role == 'assistant' and loop.index0 > ns.last and thoughts %}
{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}""",
    "what comes after thoughts": """\
{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}
{%- endif %}{{ '<|Assistant|>' + content + eos_token }}{%- else %}{{ m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}""",
    "thoughts under another name": "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}"
    "{{ m.content }};{% endfor %}",
    "an effort": """\
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- 'Reasoning: ' + reasoning_effort + '\n' }}{%- for m in messages %}{{ m.content }}{% endfor %}""",
}
PARTS = {
    "walks over parts": TemplateShape(
        "{% for m in messages %}{{ m.role }}:{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        " {{ c.text }}{% endfor %};{% endfor %}", "parts"
    ),
    "parts by index": TemplateShape(
        "{%- for m in messages %}{{ '[' ~ m.role ~ ']' }}{%- for c in m['content'] %}{%- if c['type'] == 'text' %}"
        "{{ c['text'] }}{%- elif c['type'] == 'image' %}{{ '<image>' }}{%- endif %}{%- endfor %}{%- endfor %}", "parts"
    ),
    "either of the two": TemplateShape(
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}", "either"
    ),
    "the system as a prefix": TemplateShape(
        """{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- if messages[0].content is string -%}
{%- set prefix = messages[0].content + '\n\n' -%}{%- else -%}{%- set prefix = messages[0].content[0].text + '\n\n' -%}
{%- endif -%}{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}{{ '<start_of_turn>' + m.role + '\n' + (prefix if loop.first else '') }}
{%- if m.content is string -%}{{ m.content | trim }}{%- elif m.content is iterable -%}{%- for c in m.content -%}
{{ c.text | trim if c.type == 'text' }}{%- endfor -%}{%- else -%}{{ raise_exception('content of a wrong kind') }}
{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}""", "either"
    ),
    "a user's parts, a system's text": TemplateShape(
        "{% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}{{ c.text }}|{% endfor %}"
        "{% else %}{{ m.role + '=' + m.content }};{% endif %}{% endfor %}", "parts"
    ),
    "the conversation as a text for a judge": TemplateShape(
        """{%- if messages | length % 2 == 0 -%}{%- set judged = 'Agent' -%}{%- else -%}{%- set judged = 'User' -%}
{%- endif -%}Check the last message of {{ judged }}.
{% for m in messages %}{% set content = m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | \
join(' ') | trim %}{{ '\n' ~ ('User' if loop.index0 % 2 == 0 else 'Agent') ~ ': ' ~ content }}
{% endfor %}{{ categories | default(['S1', 'S2']) | join(', ') }}""", "parts"
    ),
}  # fmt: skip
SHAPES = {name: TemplateShape(source) for name, source in (PLAIN | TOOLS | THOUGHTS).items()} | PARTS

#!/usr/bin/env python3
"""Writes render.json: what Jinja2 makes of the templates in this file.

The environment is the one that `transformers` sets up for chat templates. Run
with Jinja2 3.1 as `python3 render.py`; the test beside it renders the same
cases and compares bytes. Messages are in the form that templates read, so that
both sides see the same values.
"""

import json
import pathlib

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}`: a scope without meaning."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi <there> & \"you\" 'all' 👩‍👩‍👧 你好"},
    {"role": "assistant", "content": "Hello!\n", "reasoning_content": "They greet.\nI greet."},
    {"role": "user", "content": "مرحبا\n\nsecond paragraph  "},
]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "<think>a dog?</think>A dog."}]},
    {"role": "user", "content": "Sure?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather & wind for <city> \"now\" é",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "a city"},
                    "unit": {"type": "string", "enum": ["°C", "°F"], "default": None},
                    "days": {"type": "integer", "minimum": 0, "maximum": 1.5, "x": 1e16, "y": 1e-05},
                    "strict": {"type": "boolean", "default": True},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "parameters": {}, "empty": []}},
]
CALLS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "deep": {"z": [1, 2.0, None, True]}}}},
            {"id": "c2", "type": "function", "function": {"name": "ping", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "{\"temp\": 21}"},
    {"role": "tool", "tool_call_id": "c2", "content": "pong"},
    {"role": "user", "content": "Thanks"},
]

PLAIN = """{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""

TURNS = """{{- bos_token -}}
{%- if messages[0]['role'] in ['system', 'developer'] -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = none -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception("roles must alternate") -}}
    {%- endif -%}
    {{- '<start>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' -}}
    {%- if loop.first and system is not none -%}{{ system ~ '\\n\\n' }}{%- endif -%}
    {%- if m['content'] is string -%}
        {{- m['content'] | trim -}}
    {%- elif m['content'] is iterable -%}
        {%- for item in m['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{- '<image>' -}}
            {%- elif item['type'] == 'text' -%}
                {{- item['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- raise_exception("bad content") -}}
    {%- endif -%}
    {{- '<end>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start>model\\n' }}{%- endif -%}
"""

AGENT = """{%- macro show(content, depth=0) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if 'image' in part or part.type == 'image' -%}<|image|>
            {%- elif 'text' in part -%}{{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}
    {%- else -%}{{ raise_exception('unexpected') }}
    {%- endif -%}
{%- endmacro -%}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n" }}
    {%- if messages[0].role == 'system' %}
        {{- '\\n\\n' + show(messages[0].content)|trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + show(messages[0].content)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not(message.content is string and message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = show(message.content)|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{ raise_exception('system must be first') }}{%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {%- if loop.first and not content|trim %}{{- '<tool_call>\\n' }}{%- else %}{{- '\\n<tool_call>\\n' }}{%- endif %}
                {{- '<function=' + call.name + '>\\n' }}
                {%- for name, value in call.arguments|items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                    {{- value }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}
        {%- elif loop.last %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""

DECLARE = """{%- macro parameters(properties, required) -%}
    {%- set ns = namespace(first=false) -%}
    {%- for key, value in properties | dictsort -%}
        {%- if ns.first %},{% endif -%}{%- set ns.first = true -%}
        {{ key }}:{type:<|"|>{{ value['type'] | upper }}<|"|>
        {%- if value.description %},description:<|"|>{{ value.description }}<|"|>{% endif -%}
        {%- if value.enum %},enum:[{{ value.enum | map('upper') | join(',') }}]{% endif -%}
        {%- if key in required %},required:true{% endif -%}
        }
    {%- endfor -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
declaration:{{ tool['function']['name'] }}{ {{- parameters(tool['function']['parameters'].get('properties', {}), tool.function.parameters.get('required', [])) -}} }
{% endfor -%}
{%- for m in messages -%}
{{ m.role }}{% if m.get('tool_calls') %}{% for c in m.tool_calls %} {{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %}){% endfor %}{% endif %}
{% endfor -%}"""

# Pieces of Jinja that templates lean on, each of which some interpreter gets wrong.
PIECES = {
    "trim_blocks": "a\n{% if true %}\n  b\n{% endif %}\n  {% set x = 1 %}\nc\n\n",
    "lstrip_blocks": "  {% if true %}x{% endif %}  \n\t{# note #}\n  {{ 1 }}\n",
    "plus_keeps": "  {%+ if true %}x{% endif +%}\n y",
    "printing": "{{ true }} {{ false }} {{ none }} {{ 1 }} {{ 1.0 }} {{ 0.1 + 0.2 }} {{ [1, 'a', none, true] }} {{ {'k': \"it's\", 'n': [1.5]} }} {{ (1, 2) }}",
    "concat": "{{ 'a' ~ 1 ~ true ~ none ~ 1.0 }}{{ 'x' * 3 }}",
    "undefined": "[{{ missing }}]{{ missing is defined }}{{ missing or 'else' }}{{ missing | default('d') }}",
    "string_filter": "{{ true | string }}{{ none | string }}{{ 1.0 | string }}{{ [1] | string }}",
    "strings": "{{ ' a b '.strip() }}|{{ 'a,b,,c'.split(',') }}|{{ ' a  b '.split() }}|{{ 'abc'.upper() }}|{{ 'x'.join(['1','2']) }}|{{ 'abcabc'.replace('b', '_', 1) }}|{{ 'abc'.find('c') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'title case'.title() }}",
    "split_limit": "{{ 'a-b-c'.split('-', 1) }}{{ '</t>x</t>y'.split('</t>')[-1] }}",
    "prefixes": "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}",
    "strip_set": "{{ 'xxaxx'.strip('x') }}|{{ '\n\na\n'.lstrip('\n') }}|{{ 'a\n\n'.rstrip('\n') }}|",
    "slices": "{{ [1,2,3,4][1:3] }}{{ [1,2,3][::-1] }}{{ 'abc'[-2:] }}{{ 'abc'[0] }}{{ [1,2,3][-1] }}",
    "arithmetic": "{{ 7 // 2 }} {{ 7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ -7 // 2 }} {{ 6 / 2 }} {{ 1 == 1.0 }}",
    "logic": "{{ 'a' in 'abc' }}{{ 'k' in {'k': 1} }}{{ 1 in [1,2] and not 3 in [1] }}{{ '' or 'x' }}{{ 0 and 1 }}{{ 1 < 2 < 3 }}",
    "tests": "{{ 'x' is string }}{{ 1 is number }}{{ {} is mapping }}{{ [] is iterable }}{{ 'x' is iterable }}{{ 'x' is sequence }}{{ true is boolean }}{{ none is none }}{{ 1 is integer }}{{ true is true }}{{ 3 is odd }}{{ 'a' is eq('a') }}{{ true is number }}{{ {} is sequence }}{{ 1 is sequence }}{{ none is sequence }}{{ (1,) is sequence }}",
    "loops": "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }} {% else %}none{% endfor %}",
    "loop_filter": "{% for i in range(6) if i is even %}{{ i }}{{ ',' if not loop.last }}{% endfor %}{% for i in [] %}x{% else %}empty{% endfor %}",
    "loop_scope": "{% set x = 1 %}{% for i in [1,2] %}{% set x = 5 %}{% endfor %}{{ x }}{% set ns = namespace(x=1) %}{% for i in [1,2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "neighbours": "{% for i in [1,2,3] %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {% endfor %}{% for i in 'abc' %}{{ loop.cycle('x', 'y') }}{% endfor %}",
    "dicts": "{% set d = {'b': 1, 'a': {'c': none}} %}{{ d.items() | list }}{{ d.keys() | list }}{{ d.get('zz', 'no') }}{{ d | length }}{{ d['a'].c }}{{ d | dictsort }}{% for k in d %}{{ k }}{% endfor %}{{ d.a }}",
    "dict_names": "{% set d = {'items': 3, 'keys': 4} %}{{ d['items'] }}{{ d['keys'] }}",
    "lists": "{{ [3,1,2] | sort }}{{ [1,2] | first }}{{ [1,2] | last }}{{ [1,2] + [3] }}{{ [1,2,2] | unique | list }}{{ ['a','b'] | join('-') }}{{ [1,2,3] | sum }}{{ [1,[2]] | length }}{{ [1,2,3] | max }}{{ [1,2,3] | reverse | list }}",
    "select": "{{ [{'r': 'u', 'n': 1}, {'r': 's', 'n': 2}] | selectattr('r', 'equalto', 'u') | map(attribute='n') | list }}{{ [1, none, 2] | reject('none') | list }}{{ [{'r': 1}, {}] | selectattr('r', 'defined') | list | length }}{{ ['a', 'B'] | map('upper') | join }}",
    "text_filters": "{{ 'a b' | replace(' ', '_') }}{{ ' x ' | trim }}{{ 'abc' | capitalize }}{{ 'ABC' | lower }}{{ 'abc' | length }}{{ '%s is %d' | format('x', 3) }}{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(2, true) }}{{ '3' | int + 1 }}{{ 2.5 | round }}{{ -3 | abs }}{{ 'x' | list }}",
    "wordy_filters": "{{ 'a' | default('b') }}{{ '' | default('b', true) }}{{ none | default('b') }}{{ 'x' if false }}{{ [['a', 1]] | list }}{{ 'a,b' | upper }}",
    "set_block": "{% set x %}\n  in\n{% endset %}[{{ x }}]{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "macros": "{% macro f(a, b='B') %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=2) }}{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}",
    "call": "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}",
    "filter_block": "{% filter upper %}abc{{ 'd' }}{% endfilter %}",
    "raw": "{% raw %}{{ x }}{% endraw %}|{{ '{{' }}|{{ \"{%\" }}",
    "comments": "a{# {{ x }} {% if %} #}b\n{#- gone -#}\n c",
    "generation": "{% set x = 1 %}a{% generation %}{% set x = 2 %}b{{ x }}{% endgeneration %}{{ x }}\n{%- generation -%}\n c \n{%- endgeneration +%}\nd",
    "escapes": "{{ 'a\\nb\\t\\u00e9\\\\' }}|{{ '<&>' }}|{{ \"\\\"\" }}|{{ '\\'' }}",
    "tojson": "{{ {'b': '<é&\\'\">', 'a': [1, 2.0, none, true]} | tojson }}|{{ {'b': 1, 'a': 'é👍'} | tojson(ensure_ascii=true, sort_keys=true) }}|{{ [1, {}] | tojson(indent=2) }}|{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}|{{ 'é' | tojson }}|{{ [] | tojson(false, 4) }}",
    "tojson_tuple": "{{ (1, 2) | tojson }}{{ {1: 2} | tojson }}",
    "ternary": "{{ 'a' if messages | length > 100 else 'b' if messages else 'c' }}{{ (messages | first).role }}{{ messages[0]['role'] }}{{ messages[-1].content | length }}",
    "whitespace": "{%- for m in messages -%}\n  [{{- m.role -}}]\n{%- endfor %}\n\n x {%- if true %} y {% endif -%}  z",
    "is_not": "{{ missing is not defined }}{{ none is not none }}{{ not true }}{{ 1 is not string }}",
    "nested_access": "{{ (messages[0].nothing.deeper is defined) if messages[0].nothing is defined else 'no' }}{{ messages[0].get('nothing') }}{{ messages[0]['nothing'] is defined }}",
    "unicode": "{{ '👩‍👩‍👧' | length }}{{ 'ÀÉ' | lower }}{{ 'straße' | upper }}{{ '你好'[1] }}",
    "float_format": "{{ 1e20 }} {{ 1e-7 }} {{ -0.0 }} {{ 12345.5e3 }} {{ 100000000000000000000 }} {{ 3.14 }} {{ 1/3 }} {{ 5 | float }} {{ '%.2f' | format(3.14159) }}",
    "with": "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}",
    "string_compare": "{{ 'a' < 'b' }}{{ 'a' == \"a\" }}{{ 'a' != 'b' }}{{ [1] == [1] }}{{ {'a': 1} == {'a': 1} }}",
    "do_nothing_branches": "{% if messages %}{% elif 1 %}{% else %}{% endif %}x{% if false %}y{% endif %}",
}

# Templates of this repository, by folder; the test takes them from there.
MODELS = pathlib.Path(__file__).parents[3] / "models"
NESTED = [
    {
        "type": "function",
        "function": {
            "name": "plan",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "array", "items": {"type": "string"}}, "a": {"description": "an \"a\""}},
                "required": ["b", "a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
    {"name": "bare", "description": "No wrapper."},
]
THOUGHTS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
    {"role": "user", "content": "And 3 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Ask.",
        "tool_calls": [{"type": "function", "function": {"name": "plan", "arguments": {"b": ["x", "y"], "a": 1.5, "n": None, "t": True, "o": {"k": "v", "e": {}}}}}],
    },
    {"role": "tool", "name": "plan", "content": "6"},
]
BUNDLED = [
    (model, name, messages, tools, extra, prompt)
    for model in ["tiny-gemma4", "tiny-qwen3.5"]
    for name, messages, tools in [
        ("a chat", CHAT, None),
        ("parts", PARTS[:1], None),
        ("no messages", [], None),
        ("calls", CALLS, TOOLS),
        ("calls without a question after", CALLS[:4], TOOLS),
        ("nested tools", THOUGHTS, NESTED),
        ("system and tools", CHAT, NESTED),
    ]
    for extra, prompt in [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
]

CASES = [
    ("plain", PLAIN, CHAT, None, {}, True),
    ("plain, no prompt", PLAIN, CHAT[:2], None, {}, False),
    ("turns", TURNS, CHAT, None, {}, True),
    ("turns with parts", TURNS, PARTS, None, {}, True),
    ("turns that do not alternate", TURNS, CHAT[1:2] * 3, None, {}, True),
    ("agent", AGENT, CHAT, None, {}, True),
    ("agent with tools", AGENT, CALLS, TOOLS, {}, True),
    ("agent with parts", AGENT, PARTS, TOOLS, {"enable_thinking": False}, True),
    ("turns that begin with a reply", TURNS, CHAT[2:], None, {}, True),
    ("agent in a tool turn", AGENT, CALLS[:3], TOOLS, {"enable_thinking": True}, False),
    ("declare", DECLARE, CALLS, TOOLS, {}, True),
] + [(f"piece {name}", source, CHAT, None, {}, True) for name, source in PIECES.items()]


def main():
    env = environment()
    cases = []
    bundled = [
        ({"name": f"{model}: {name}", "model": model}, (MODELS / model / "chat_template.jinja").read_text(), *rest)
        for model, name, *rest in BUNDLED
    ]
    own = [({"name": name, "template": source}, source, *rest) for name, source, *rest in CASES]
    for case, source, messages, tools, extra, prompt in own + bundled:
        case = case | {"messages": messages, "tools": tools, "extra": extra, "add_generation_prompt": prompt}
        try:
            case["expected"] = env.from_string(source).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, bos_token="<bos>", eos_token="<eos>", **extra
            )
        except jinja2.exceptions.TemplateError as err:
            case["refused"] = str(err)
        cases.append(case)
    path = pathlib.Path(__file__).with_name("render.json")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    path.write_text(f"[\n{lines}\n]\n")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()

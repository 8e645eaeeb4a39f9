//! Chat templates that were written to end, stall or fill the process.
//!
//! The only test of this file: the allocator counts for the whole process.

use peak_alloc::PeakAlloc;
use serde_json::{Map, Value, json};
use text::ChatTemplate;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a template may take: its values, the prompt so far, and copies of either while
/// they grow.
const BYTES_MAX: usize = 32 << 20;

/// Templates of one expression or program each, none of which can end well.
const ATTACKS: &[&str] = &[
    "{{ 'x' | indent(9999999999) }}",
    "{{ 'x' | indent(width=9999999999, first=true) }}",
    "{{ ('x\\n' * 100000) | indent(100000) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%*d' | format(999999999, 1) }}",
    "{{ '%.999999999f' | format(1.5) }}",
    "{{ ('%s' * 10000) | format('x' * 100000) }}",
    "{{ '{:>999999999}'.format('x') }}",
    "{{ '{:{}}'.format('x', 999999999) }}",
    "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "{{ messages[0].content * 99999999 }}",
    "{{ [1] * 99999999 }}",
    "{{ (1, 2) * 40000000 }}",
    "{{ ([1] * 1000) * 1000 * 1000 }}",
    "{{ (range(99999) | list) * 1000 | length }}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == [ns.x] }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x | batch(1) | list %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = dict(a=ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = [{'a': ns}] %}{{ ns | tojson }}",
    "{% set a = namespace(x=1) %}{% set b = namespace(x=a) %}{% set a.x = b %}{{ a }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('x' * 100000).join('y' * 100000) }}",
    "{{ ('y' * 100000) | join('x' * 100000) }}",
    "{{ (range(99999) | join('x' * 100000)) | length }}",
    "{{ ('a,' * 4000000).split(',') | length }}",
    "{{ ('a' * 8000000) | list | length }}",
    "{{ ('\\n' * 8000000).splitlines() | length }}",
    "{{ [1] | batch(9999999999, 'x') | list }}",
    "{{ [1] | slice(9999999999) | list }}",
    "{{ (['a' * 100000] * 1000) | sum(start='') | length }}",
    "{{ (['a' * 100000] * 1000) | join | length }}",
    "{{ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) }}",
    "{{ 'a' * ((true + true) ** 26) ~ 'a' * ((1 == 1) + 40000000) }}",
    "{{ [[1] * 99999999] }}",
    "{{ {'a': 'b' * 99999999} }}",
    "{{ (['a\n' * 1000] * 1000) | map('indent', 100000) | list | length }}",
    "{{ (['a' * 1000] * 1000) | map('replace', 'a', 'b' * 1000) | list | length }}",
    "{{ [[1]] | map('map', 'indent', 999999999) | list }}",
    "{{ ['x'] | map('\\x00captured') | list }}",
    "{{ ([['a' * 1000000]] * 1000) | tojson(indent=4) }}",
    "{{ ([['a' * 1000000]] * 1000) | pprint }}",
    "{{ ([['a' * 1000000]] * 1000) | string | length }}",
    "{{ ([['a' * 1000000]] * 1000) ~ '' }}",
    "{{ ('<' * 4000000) | escape | length }}",
    "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}{{ x | length }}",
    "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endmacro %}{{ f() | length }}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(64) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "{% filter indent(9999999999) %}x{% endfilter %}",
    "{% for i in range(99999) %}{% for j in range(99) %}{% macro f() %}{{ i }}{% endmacro %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ['a number of bytes that is no short string ' ~ i] %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x[0:] %}{% endfor %}{% for i in range(99999) %}{% set ns.x = ns.x | reverse %}{% endfor %}{% for i in range(99999) %}{% for j in range(9) %}{% set ns.x = ns.x * 1 %}{% endfor %}{% endfor %}",
    "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% if s[3999999] == 'b' %}{% endif %}{% if s == s ~ 'b' %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{{ s | length }}{{ s.find('b') }}{{ 'b' in s }}{{ s is upper }}{% endfor %}",
    "{% set s = 'ab' * 1000000 %}{{ s.strip(s) }}{{ s | trim(s) }}{% for i in range(99999) %}{{ s.strip('ab' * 100) }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for i in range(99999) %}{{ loop.changed(range(99999) | list) }}{% endfor %}",
    "{% for a in messages recursive %}{{ loop([a, a]) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'default' %}",
    "{% import 'default' as d %}{{ d.x }}",
    "{% extends 'default' %}",
    "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(*range(99999)) }}",
    "{{ debug() }}{{ raise_exception('only where debug is missing') }}",
];

#[test]
fn no_template_takes_more_than_its_memory() {
    let messages = json!([{"role": "user", "content": "hello there, this is a message"}]);
    let mut wrong = Vec::new();
    for source in ATTACKS {
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let result = ChatTemplate::new(Some(source), &Value::Null)
            .and_then(|template| template.render(&messages, None, true, &Map::new()));
        let used = ALLOCATOR.peak_usage().saturating_sub(before);
        if result.is_ok() {
            wrong.push(format!("rendered: {source}"));
        }
        if used > BYTES_MAX {
            wrong.push(format!("{used} bytes: {source}"));
        }
        drop(result);
        let kept = ALLOCATOR.current_usage().saturating_sub(before);
        if kept > 1 << 20 {
            wrong.push(format!("{kept} bytes are kept: {source}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // An honest conversation of 8 MB renders, with copies of each message on the way.
    let source = "{%- for m in messages -%}{%- set text = m.content | trim -%}\
        {%- if '</think>' in text -%}{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}\
        {{- '<' + m.role + '>' + text ~ '\\n' -}}{%- endfor -%}";
    let template = ChatTemplate::new(Some(source), &Value::Null).unwrap();
    for n in [1, 80, 8000] {
        let message =
            json!({"role": "user", "content": "honest text ".repeat(8_000_000 / 12 / n - 3)});
        let messages = Value::Array(vec![message; n]);
        let text = template.render(&messages, None, true, &Map::new()).unwrap();
        assert!(text.len() > 7_500_000, "{}", text.len());
    }
}

//! llama.cpp's grammar language, translated to Lark.
//!
//! ```text
//! # one or more numbers
//! root   ::= number ("," ws number)*
//! number ::= "-"? [0-9]{1,15}
//! ws     ::= [ \t\n]?
//! ```
//!
//! The two languages differ in one deep way. In GBNF a rule matches characters, whatever lies
//! around it. In Lark the text is first cut into *lexemes*, pieces that match a regular
//! expression, each as long as it can be: `"a"* "a"` matches `aa` in GBNF, and nothing in Lark
//! if `"a"*` is a lexeme. With a lexeme for each character the two agree, but then each mask
//! would cost a parser step for each character of each token of the vocabulary.
//!
//! So parts of the grammar that are regular become lexemes where that is proven to change
//! nothing ([`lexemes`]), and are broken up where it is not.
//!
//! Supported is what llama.cpp documents: rules, alternatives, groups, literals and classes with
//! their escapes, `.`, `* + ?`, `{m}`, `{m,}`, `{m,n}` and comments. Not its names of tokens.
//! Left recursion, which llama.cpp refuses, is fine.

mod emit;
mod lexemes;
mod parse;

use crate::{Error, Limits};

/// The grammar `text` in Lark.
///
/// # Errors
///
/// [`Error::Invalid`] with the line, [`Error::TooLarge`], or [`Error::Unsatisfiable`] if no text
/// follows the grammar.
pub(crate) fn to_lark(text: &str, limits: &Limits) -> Result<String, Error> {
    let rules = parse::parse(text, limits)?;
    let grammar = lexemes::Grammar::new(&rules, limits)?;
    Ok(emit::lark(&grammar))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::parse::{Node, Rules};
    use super::*;
    use crate::{Compiler, Grammar, Spec, Token, Vocabulary};

    fn compiler() -> Compiler {
        let mut tokens: Vec<Token> = (0..=255).map(|byte| Token::Bytes(vec![byte])).collect();
        tokens.push(Token::Special("<|end|>".to_owned()));
        let tokenize = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect();
        let vocabulary = Vocabulary::new(tokens, &[256], Arc::new(tokenize)).unwrap();
        Compiler::new(vocabulary, Limits::default())
    }

    fn accepts(grammar: &Grammar, text: &str) -> bool {
        follow(grammar, text).unwrap()
    }

    fn follow(grammar: &Grammar, text: &str) -> Result<bool, Error> {
        let mut matcher = grammar.start();
        for byte in text.bytes() {
            if !matcher.push(u32::from(byte))? {
                return Ok(false);
            }
        }
        Ok(matcher.may_end())
    }

    #[track_caller]
    fn check(grammar: &str, yes: &[&str], no: &[&str]) {
        let grammar = compiler().compile(&Spec::Gbnf(grammar.to_owned())).unwrap();
        for text in yes {
            assert!(accepts(&grammar, text), "{text:?}");
        }
        for text in no {
            assert!(!accepts(&grammar, text), "{text:?}");
        }
    }

    #[test]
    fn json() {
        check(
            r#"
# a value, and blanks after each part
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#,
            &[
                "{}",
                r#"{"a": [1, -2.5e3, "x\"\u00e9字"], "b": {"c": null}}"#,
                "{\n    \"a\": true\n}\n",
            ],
            &[
                "",
                "[]",
                r#"{"a"}"#,
                r#"{"a": 01}"#,
                "{  }",
                r#"{"a": "\x"}"#,
            ],
        );
    }

    #[test]
    fn a_list_and_its_counts() {
        check(
            "root ::= item{2,3} end\nitem ::= \"- \" [^\\r\\n]+ \"\\n\" # one line\n\nend ::=\n  \"---\" | \"***\"",
            &["- a\n- b\n---", "- a\n- - b\n- c\n***"],
            &["- a\n---", "- a\n- b\n- c\n- d\n---", "- a\n- \n---"],
        );
    }

    #[test]
    fn arithmetic_with_left_recursion() {
        check(
            r#"
root ::= sum
sum  ::= sum [+-] term | term
term ::= term ("*" | "/") atom | atom
atom ::= [0-9]+ ("." [0-9]*)? | "(" sum ")"
"#,
            &["1", "1+2*3", "(1-2)/3.*4.25", "((7))"],
            &["", "1+", "(1", "1**2", ".5"],
        );
    }

    #[test]
    fn moves_of_chess() {
        check(
            r#"
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"#,
            &[
                "1. e4 e5\n2. Nf3 Nc6\n",
                "1. e4 exd5+\n10. O-O-O Nbxd7#\n11. e8=Q O-O\n",
            ],
            &["1. e4 e5\n", "1. e9 e5\n2. Nf3 Nc6\n", "1. e4 e5\n2. Nf3\n"],
        );
    }

    #[test]
    fn nothing_is_cut_too_greedily() {
        check(
            "root ::= \"a\"* \"a\" | \"(\" root \")\"",
            &["a", "aaa", "((aa))"],
            &["", "()", "(a"],
        );
        check(
            "root ::= x root y | \"\"\nx ::= \"a\" | \"ab\"\ny ::= \"b\" | \"c\"",
            &["", "ab", "abc", "abb", "aabbb", "aabcb"],
            &["a", "ac b", "b"],
        );
        check(
            "root ::= .{2} | \"\\U0001F600\"",
            &["ab", "é字", "😀"],
            &["a", "abc"],
        );
    }

    /// Where the texts of `node` from `from` on may end, given the same of all rules.
    fn ends(
        node: &Node,
        text: &[u8],
        from: usize,
        known: &[Vec<BTreeSet<usize>>],
    ) -> BTreeSet<usize> {
        match node {
            Node::Class(class) => {
                let byte = text.get(from).map(|&byte| u32::from(byte));
                let within = |byte| {
                    class
                        .ranges
                        .iter()
                        .any(|&(lo, hi)| (lo..=hi).contains(&byte))
                };
                byte.filter(|&byte| within(byte))
                    .map(|_| from + 1)
                    .into_iter()
                    .collect()
            }
            Node::Sequence(nodes) => nodes.iter().fold(BTreeSet::from([from]), |at, node| {
                at.into_iter()
                    .flat_map(|at| ends(node, text, at, known))
                    .collect()
            }),
            Node::Alternatives(nodes) => nodes
                .iter()
                .flat_map(|node| ends(node, text, from, known))
                .collect(),
            Node::Repeat(node, min, max) => {
                let mut out = BTreeSet::new();
                let mut at = BTreeSet::from([from]);
                // More rounds than characters find nothing new.
                for i in 0..=max.unwrap_or(*min + text.len() as u32 + 1) {
                    if i >= *min {
                        out.extend(&at);
                    }
                    at = at
                        .into_iter()
                        .flat_map(|at| ends(node, text, at, known))
                        .collect();
                }
                out
            }
            Node::Rule(id) => known[*id][from].clone(),
        }
    }

    /// Whether `text` follows the grammar, worked out from its definition.
    fn follows(rules: &Rules, text: &[u8]) -> bool {
        let mut known = vec![vec![BTreeSet::new(); text.len() + 1]; rules.bodies.len()];
        loop {
            let mut changed = false;
            for (id, body) in rules.bodies.iter().enumerate() {
                for from in 0..=text.len() {
                    let found = ends(body, text, from, &known);
                    changed |= found != known[id][from];
                    known[id][from] = found;
                }
            }
            if !changed {
                return known[rules.root][0].contains(&text.len());
            }
        }
    }

    fn part() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            Just("\"a\"".to_owned()),
            Just("\"b\"".to_owned()),
            Just("\"ab\"".to_owned()),
            Just("[ab]".to_owned()),
            Just("\"\"".to_owned()),
            Just("root".to_owned()),
            Just("x".to_owned()),
            Just("y".to_owned()),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.join(" ")),
                prop::collection::vec(inner.clone(), 2..4)
                    .prop_map(|parts| format!("({})", parts.join(" | "))),
                (
                    inner,
                    prop_oneof!["\\*", "\\+", "\\?", "\\{2\\}", "\\{0,2\\}"]
                )
                    .prop_map(|(part, op)| format!("({part}){op}")),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_grammar_means_what_its_definition_says(root in part(), x in part(), y in part()) {
            let text = format!("root ::= {root}\nx ::= {x}\ny ::= {y}");
            let rules = parse::parse(&text, &Limits::default()).unwrap();
            let grammar = match compiler().compile(&Spec::Gbnf(text.clone())) {
                Ok(grammar) => grammar,
                // No text follows it, or only the empty one.
                Err(Error::Unsatisfiable { .. }) => return Ok(()),
                Err(err) => panic!("{err}: {text}"),
            };
            for n in 0..=6 {
                for bits in 0..1_u32 << n {
                    let word: String = (0..n).map(|i| if bits >> i & 1 == 0 { 'a' } else { 'b' }).collect();
                    match follow(&grammar, &word) {
                        Ok(found) => assert_eq!(found, follows(&rules, word.as_bytes()), "{word:?} of {text}"),
                        // A grammar that is ambiguous beyond the limits says so.
                        Err(Error::TooComplex { .. }) => return Ok(()),
                        Err(err) => panic!("{err}: {text}"),
                    }
                }
            }
        }
    }
}

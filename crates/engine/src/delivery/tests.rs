//! Tests of delivery: tokens of bundled vocabularies become segments by channel.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::json;
use text::{TextFiles, Tools};

use super::*;
use crate::request::{CallPart, ToolUse};

fn text(model: &str) -> Text {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    TextFiles::open(&models.join(model)).unwrap()
}

fn tools() -> Arc<Tools> {
    let city = json!({"properties": {"city": {"type": "string"}}});
    Arc::new(Tools::new(&json!([{"name": "sky", "parameters": city}])))
}

/// What a reply says by channel: reasoning, answer, and calls as `name arguments end`.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    reasoning: String,
    answer: String,
    calls: Vec<String>,
    /// The tokens of each channel: reasoning, answer, calls.
    tokens: [usize; 3],
}

impl Heard {
    fn hear(&mut self, segments: Vec<Segment>) {
        for segment in segments {
            let at = match segment.channel {
                Channel::Reasoning => 0,
                Channel::Answer => 1,
                Channel::ToolCall => 2,
            };
            self.tokens[at] += segment.tokens.len();
            match (segment.channel, segment.call) {
                (Channel::Reasoning, None) => self.reasoning += &segment.text,
                (Channel::Answer, None) => self.answer += &segment.text,
                (Channel::ToolCall, None) => assert_eq!(segment.text, ""),
                (Channel::ToolCall, Some(CallPart { index, begin, end })) => {
                    if let Some(begin) = begin {
                        assert!(begin.id.starts_with("call_") && begin.id.len() == 29);
                        assert_eq!(index, self.calls.len());
                        self.calls.push(begin.name + " ");
                    }
                    self.calls[index] += &segment.text;
                    match end {
                        Some(CallEnd::Whole) => self.calls[index] += " whole",
                        Some(CallEnd::Broken) => self.calls[index] += " broken",
                        None => {}
                    }
                }
                (channel, call) => panic!("{channel:?} with {call:?}"),
            }
        }
    }
}

/// What is heard of `reply` after `prompt`, and why it ended; a token a round.
fn heard(text: &Text, request: Request, prompt: &str, reply: &str) -> (Heard, FinishReason) {
    let request = Request {
        prompt: text.tokenizer.encode(prompt, false).unwrap(),
        ..request
    };
    let mut writing = Writing::new(text, &request);
    let mut stops = StopStrings::new(&request.stop).unwrap();
    let mut heard = Heard::default();
    let mut reason = None;
    for token in text.tokenizer.encode(reply, false).unwrap() {
        let mut segments = Vec::new();
        let taken = writing.take(text, token, &mut stops, &mut segments);
        let written = WrittenToken {
            id: token,
            text: taken.text,
            logprobs: None,
        };
        Segment::last_of(&mut segments, taken.channel)
            .tokens
            .push(written);
        heard.hear(segments);
        if taken.hit.is_some() {
            reason = Some(FinishReason::StopString(request.stop[0].clone()));
            break;
        }
        if writing.is_full() {
            reason = Some(FinishReason::ToolCalls);
            break;
        }
    }
    let mut segments = Vec::new();
    let reason = writing.finish(reason.unwrap_or(FinishReason::Stop), &mut segments);
    heard.hear(segments);
    (heard, reason)
}

fn offering(calls_max: Option<usize>) -> Request {
    Request {
        splits_reasoning: true,
        tools: Some(ToolUse {
            tools: tools(),
            calls_max,
        }),
        ..Request::new(Vec::new())
    }
}

const CALL: &str =
    "<tool_call>\n<function=sky>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>";
const SKY: &str = "sky {\"city\":\"Rome\"} whole";
const ASK: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
const THINK: &str = "<|im_start|>assistant\n<think>\n";

#[test]
fn calls_come_apart_from_reasoning_and_answer() {
    let qwen = text("tiny-qwen3.5");
    let (heard, reason) = heard(
        &qwen,
        offering(None),
        THINK,
        &format!("I {CALL} say.\n</think>\n\nLet me look.\n\n{CALL}\n{CALL}"),
    );
    assert_eq!(reason, FinishReason::ToolCalls);
    // A call inside reasoning is reasoning.
    assert_eq!(heard.reasoning, format!("I {CALL} say."));
    assert_eq!(heard.answer, "Let me look.");
    assert_eq!(heard.calls, [SKY, SKY]);
    assert!(heard.tokens.iter().all(|&n| n > 0), "{heard:?}");
}

#[test]
fn a_text_ends_after_its_last_call() {
    let qwen = text("tiny-qwen3.5");
    let reply = format!("{CALL}\n{CALL}\nSo.");
    let (one, reason) = heard(&qwen, offering(Some(1)), ASK, &reply);
    assert_eq!(reason, FinishReason::ToolCalls);
    assert_eq!(
        (one.answer.as_str(), &one.calls[..]),
        ("", &[SKY.to_owned()][..])
    );
    let (all, _) = heard(&qwen, offering(None), ASK, &reply);
    assert_eq!((all.answer.as_str(), all.calls.len()), ("So.", 2));
}

#[test]
fn what_is_no_call_is_the_text_that_it_is_without_tools() {
    let (qwen, gemma) = (text("tiny-qwen3.5"), text("tiny-gemma4"));
    for (text, prompt, reply) in [
        (&qwen, THINK, "a\n</think>\n\n b  \n"),
        (&qwen, ASK, "  b \n\n"),
        (
            &gemma,
            "<|turn>model\n",
            "<|channel>thought\na\n<channel|>b\n",
        ),
    ] {
        let plain = Request {
            tools: None,
            ..offering(None)
        };
        let with = heard(text, offering(None), prompt, reply);
        assert_eq!(with.1, FinishReason::Stop);
        assert_eq!(with, heard(text, plain, prompt, reply));
    }
    // A call that stops before its end is text, also where a stop string ends it.
    let mut request = offering(None);
    request.stop = vec!["Ro".to_owned()];
    let (cut, reason) = heard(&qwen, request, ASK, CALL);
    assert_eq!(reason, FinishReason::StopString("Ro".to_owned()));
    assert_eq!(cut.answer, CALL[..CALL.find("Rome").unwrap()]);
    assert_eq!(cut.calls, ["sky {\"city\":\" broken"]);
}

#[test]
fn gemma_s_marks_are_special_tokens_and_show_up_where_a_call_is_none() {
    let gemma = text("tiny-gemma4");
    let prompt = "<|turn>model\n";
    let call = "<|tool_call>call:sky{city:<|\"|>Rome<|\"|>}<tool_call|>";
    let reply = format!("<|channel>thought\n{call}<channel|>{call}");
    let (split, reason) = heard(&gemma, offering(None), prompt, &reply);
    assert_eq!(
        (split.reasoning.as_str(), split.answer.as_str()),
        (call, "")
    );
    assert_eq!(
        (&split.calls[..], reason),
        (&[SKY.to_owned()][..], FinishReason::ToolCalls)
    );
    let broken = "<|tool_call>call:sky{city:<|\"|>Rome<tool_call|>";
    let (heard_broken, reason) = heard(&gemma, offering(None), prompt, broken);
    assert_eq!(
        (heard_broken.answer.as_str(), reason),
        (broken, FinishReason::Stop)
    );
    // Reasoning that is not split off is text, calls in it too.
    let request = Request {
        splits_reasoning: false,
        shows_reasoning_marks: true,
        ..offering(None)
    };
    let (unsplit, _) = heard(&gemma, request, prompt, &reply);
    assert_eq!(
        unsplit.answer,
        format!("<|channel>thought\n{call}<channel|>")
    );
    assert_eq!(unsplit.calls, [SKY]);
}

#[test]
fn marks_of_reasoning_inside_a_call_are_part_of_it() {
    let qwen = text("tiny-qwen3.5");
    let call = CALL.replace("Rome", "a <think> b </think> c");
    let (heard, _) = heard(&qwen, offering(None), ASK, &call);
    assert_eq!(
        heard.calls,
        ["sky {\"city\":\"a <think> b </think> c\"} whole"]
    );
    assert_eq!(heard.tokens[0], 0);
}

/// A reply to `request` whose text is kept.
fn reply(text: &Text, request: &Request) -> (Reply, Arc<Mutex<String>>) {
    let said = Arc::new(Mutex::new(String::new()));
    let heard = said.clone();
    let sink = move |event| {
        if let Event::Text(segments) = event {
            let texts = segments.iter().map(|segment| &*segment.text);
            heard.lock().unwrap().extend(texts);
        }
        true
    };
    let reply = Reply {
        sink: Box::new(sink),
        writing: Writing::new(text, request),
        stops: StopStrings::new(&request.stop).unwrap(),
        stop_strings: request.stop.clone(),
        read: 0,
        delivered: 0,
        token_times: None,
    };
    (reply, said)
}

/// What a round has brought that wrote `written` and ended so.
fn news(text: &Text, written: &str, finish: Finish) -> News {
    let tokens = text.tokenizer.encode(written, false).unwrap();
    News {
        progress: Progress {
            done: 1,
            total: 1,
            cached: 0,
        },
        n_output: tokens.len(),
        tokens,
        logprobs: Vec::new(),
        round: None,
        finish: Some(finish),
        pools: false,
    }
}

#[test]
fn a_fault_behind_the_end_of_a_text_is_none_of_the_request() {
    let text = text("tiny-gemma4");
    let mut request = Request::new(Vec::new());
    let faulty = |request: &Request| {
        let (mut reply, said) = reply(&text, request);
        let end = reply.deliver(&text, news(&text, "one\ntwo", Finish::NoToken));
        (end.unwrap(), said.lock().unwrap().clone())
    };
    assert_eq!(faulty(&request), (End::Fault, "one\ntwo".into()));
    request.stop = vec!["\n".into()];
    let stopped = FinishReason::StopString("\n".into());
    assert_eq!(faulty(&request), (End::Text(stopped), "one".into()));
    request.stop.clear();
    request.lines.indent = 2;
    let (end, said) = faulty(&request);
    assert_eq!(end, End::Text(FinishReason::Length));
    assert!(!said.contains("two"), "{said}");
}

#[test]
fn text_that_was_held_back_keeps_within_the_limits_of_lines() {
    let text = text("tiny-gemma4");
    let mut request = Request::new(Vec::new());
    request.stop = vec!["\ntwo and more".into()];
    request.lines.indent = 2;
    let (mut reply, said) = reply(&text, &request);
    let end = reply.deliver(&text, news(&text, "one\ntwo", Finish::Length));
    assert_eq!(end, Some(End::Text(FinishReason::Length)));
    let said = said.lock().unwrap();
    assert!(said.starts_with("one") && !said.contains("two"), "{said}");
}

//! Delivery beside drafting sends what delivery after it sends.

mod bundled;

use engine::{
    DraftChoice, DraftLength, Engine, EngineOptions, Event, FinishReason, LogprobsOf, Request,
    StepSink, TopLogprobs,
};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

/// Models whose drafter has a model of its own.
const DRAFTING: [&str; 2] = ["tiny-gemma4", "tiny-qwen3.5"];

/// How many steps delivered beside drafting, and how many did not.
type Steps = Arc<Mutex<[usize; 2]>>;

fn start(name: &str, draft: DraftChoice, overlap: bool) -> (Engine, Steps) {
    let steps = Steps::default();
    let heard = steps.clone();
    let options = EngineOptions {
        overlap,
        step_sink: Some(StepSink(Arc::new(move |report| {
            heard.lock().unwrap()[usize::from(report.delivery.is_none())] += 1;
        }))),
        ..EngineOptions::default()
    };
    (Engine::start(bundled::load(name, draft, 0), options), steps)
}

fn request(engine: &Engine, prompt: &str) -> Request {
    Request {
        max_tokens: Some(40),
        draft: Some(DraftLength::Fixed(3)),
        trace: true,
        ..Request::new(engine.text().encode_prompt(prompt).unwrap())
    }
}

/// Texts that end in each way that delivery has a say in, and beside one another.
fn requests(engine: &Engine) -> Vec<Request> {
    let mut stopped = request(engine, "Once upon a time there was a");
    stopped.stop = vec![".".into(), " the ".into()];
    let mut judged = request(engine, "One day, a little rabbit went to");
    judged.logprobs = Some(TopLogprobs {
        top: 2,
        of: LogprobsOf::Logits,
    });
    let mut sampled = request(engine, "Tom and Mia wanted to build a");
    sampled.sampling.temperature = 0.8;
    sampled.sampling.seed = 7;
    vec![stopped, judged, sampled]
}

/// What a request is told, but for how far its prompt is, which depends on the others.
fn told(engine: &Engine, request: Request) -> Receiver<Vec<String>> {
    let (ended, inbox) = channel();
    let mut told = Vec::new();
    let sink = move |event: Event| {
        match event {
            Event::Prefill { .. } => {}
            Event::Done(outcome) => {
                told.push(format!("{:?} {:?}", outcome.finish, outcome.usage));
                return ended.send(std::mem::take(&mut told)).is_ok();
            }
            event => told.push(format!("{event:?}")),
        }
        true
    };
    engine.submit(request, Box::new(sink)).unwrap();
    inbox
}

#[test]
fn events_are_the_same_whether_delivery_waits_for_drafts_or_not() {
    for name in DRAFTING {
        let run = |overlap| {
            let (engine, steps) = start(name, DraftChoice::Auto, overlap);
            let each = requests(&engine).into_iter();
            let inboxes: Vec<_> = each.map(|request| told(&engine, request)).collect();
            let told: Vec<Vec<String>> = inboxes.iter().map(|i| i.recv().unwrap()).collect();
            drop(engine);
            let steps = *steps.lock().unwrap();
            (told, steps)
        };
        let (beside, [n_beside, n_after]) = run(true);
        assert!(n_beside > 0 && n_after == 0, "{name}");
        let (after, [n_beside, n_after]) = run(false);
        assert!(n_beside == 0 && n_after > 0, "{name}");
        assert_eq!(beside, after, "{name}");
        assert!(
            beside[0].last().unwrap().starts_with("StopString"),
            "{beside:?}"
        );
        assert!(beside[1].iter().any(|told| told.contains("logprobs: Some")));
    }
}

#[test]
fn a_text_that_nobody_listens_to_ends_in_the_same_round() {
    for name in DRAFTING {
        let tokens = [true, false].map(|overlap| {
            let (engine, _) = start(name, DraftChoice::Auto, overlap);
            let (ended, inbox) = channel();
            let mut rounds = 0;
            let sink = move |event: Event| {
                match event {
                    Event::Text(_) => rounds += 1,
                    Event::Done(outcome) => {
                        assert_eq!(outcome.finish, FinishReason::Cancelled);
                        ended.send(outcome.usage.completion_tokens).unwrap();
                    }
                    _ => {}
                }
                rounds < 4
            };
            let request = request(&engine, "Once upon a time there was a");
            engine.submit(request, Box::new(sink)).unwrap();
            inbox.recv().unwrap()
        });
        assert_eq!(tokens[0], tokens[1], "{name}");
        assert!(tokens[0] >= 4, "{name}: {tokens:?}");
    }
}

#[test]
fn without_a_drafter_nothing_is_delivered_beside_drafting() {
    let (engine, steps) = start("tiny-gemma4", "ngram".parse().unwrap(), true);
    let request = request(&engine, "Once upon a time");
    engine.complete(request).unwrap();
    drop(engine);
    let [n_beside, n_after] = *steps.lock().unwrap();
    assert!(n_beside == 0 && n_after > 0);
}

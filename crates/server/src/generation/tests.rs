use engine::CallBegin;

use super::*;

fn said(reasoning: &str, answer: &str) -> Piece {
    let segment = |channel, text: &str| Segment {
        text: text.to_owned(),
        ..Segment::new(channel)
    };
    Piece::new(
        vec![
            segment(Channel::Reasoning, reasoning),
            segment(Channel::Answer, answer),
        ],
        false,
    )
}

#[test]
fn text_grows_into_one_piece_and_the_end_comes_after_it() {
    let mailbox = Mailbox::new(100, Wants::default());
    assert!(mailbox.take().is_none());
    assert!(mailbox.push(said("", "a")));
    assert!(mailbox.push(said("", "")) && mailbox.push(said("c", "b")));
    mailbox.end(End::Failed(ApiError::internal()));
    mailbox.end(End::Failed(ApiError::busy()));
    let Some(Step::Text(whole)) = mailbox.take() else {
        panic!("text");
    };
    // In the order in which it was written, and whole by channel.
    assert_eq!(whole.segments.len(), 3);
    assert_eq!(whole.text(Channel::Reasoning), "c");
    assert_eq!(whole.text(Channel::Answer), "ab");
    assert_eq!(whole.text(Channel::ToolCall), "");
    assert!(matches!(mailbox.take(), Some(Step::Failed(error)) if error == ApiError::internal()));
    assert!(mailbox.take().is_none());
}

#[test]
fn calls_grow_piece_by_piece_and_broken_ones_are_none() {
    let part = |index, name: Option<&str>, json: &str, end| {
        let begin = name.map(|name| CallBegin {
            id: format!("call_{index}"),
            name: name.to_owned(),
        });
        Piece::new(
            vec![Segment {
                text: json.to_owned(),
                call: Some(CallPart { index, begin, end }),
                ..Segment::new(Channel::ToolCall)
            }],
            false,
        )
    };
    let (whole, broken) = (Some(CallEnd::Whole), Some(CallEnd::Broken));
    let mailbox = Mailbox::new(100, Wants::default());
    for piece in [
        part(0, Some("f"), "", None),
        part(0, None, "{\"a\":", None),
        part(0, None, "1}", None),
        part(0, None, "", whole),
        part(1, Some("g"), "{\"b", None),
        part(1, None, "", broken),
        said("", "text"),
        part(2, Some("f"), "{}", whole),
    ] {
        assert!(mailbox.push(piece));
    }
    let Some(Step::Text(piece)) = mailbox.take() else {
        panic!("text");
    };
    let calls = piece.calls();
    let calls: Vec<_> = calls
        .iter()
        .map(|c| (c.id, c.name, c.arguments.as_str()))
        .collect();
    assert_eq!(calls, [("call_0", "f", "{\"a\":1}"), ("call_2", "f", "{}")]);
    assert_eq!(piece.text(Channel::Answer), "text");
    assert_eq!(piece.call_parts().count(), 3);
    // What is kept for a slow reader includes calls.
    assert!(!Mailbox::new(6, Wants::default()).push(part(0, Some("f"), "", None)));
}

#[test]
fn a_reader_too_far_behind_is_cut_off() {
    let mailbox = Mailbox::new(4, Wants::default());
    assert!(mailbox.push(said("ab", "cd")));
    assert!(!mailbox.push(said("", "e")));
    assert!(!mailbox.push(said("", "")));
    assert!(
        matches!(mailbox.take(), Some(Step::Failed(error)) if error == ApiError::slow_reader(4))
    );
}

#[test]
fn nothing_is_kept_for_a_reader_that_left() {
    let mailbox = Mailbox::new(4, Wants::default());
    mailbox.leave();
    assert!(!mailbox.push(said("", "a")));
    assert!(mailbox.take().is_none());
}

#[test]
fn tokens_wait_for_text_but_not_beyond_the_end() {
    let token = |id| {
        let token = WrittenToken {
            id,
            text: String::new(),
            logprobs: Some(Logprobs::default()),
        };
        Piece::new(
            vec![Segment {
                tokens: vec![token],
                ..Segment::new(Channel::Answer)
            }],
            false,
        )
    };
    let mailbox = Mailbox::new(1000, Wants::default());
    assert!(mailbox.push(token(1)));
    assert!(mailbox.take().is_none());
    assert!(mailbox.push(said("", "a")));
    let whole = |piece: &Piece| {
        (
            piece.judged().count(),
            piece.text(Channel::Answer).into_owned(),
        )
    };
    assert!(matches!(mailbox.take(), Some(Step::Text(piece)) if whole(&piece) == (1, "a".into())));
    assert!(mailbox.push(token(2)));
    mailbox.end(End::Failed(ApiError::internal()));
    assert!(matches!(mailbox.take(), Some(Step::Text(piece)) if whole(&piece) == (1, "".into())));
    assert!(matches!(mailbox.take(), Some(Step::Failed(_))));
    assert!(mailbox.take().is_none());
    // What is kept for a slow reader includes calls.
    let small = Mailbox::new(20, Wants::default());
    assert!(!small.push(token(1)));
}

#[test]
fn an_engine_that_lets_go_without_a_word_is_an_error_and_not_a_hang() {
    let metrics = Arc::new(Metrics::new(8));
    let mailbox = Arc::new(Mailbox::new(4, Wants::default()));
    let slots = Arc::new(Slots::new(1));
    let inlet = || Inlet {
        mailbox: mailbox.clone(),
        metrics: metrics.clone(),
        slots: slots.clone(),
        run: slots.run(&Request::new(vec![1])),
        started: Instant::now(),
        span: tracing::Span::none(),
        last: None,
    };
    let is_failed = |step| matches!(step, Some(Step::Failed(e)) if e == ApiError::internal());
    drop(inlet());
    assert!(is_failed(mailbox.take()));
    assert!(!metrics.engine_lost.load(Ordering::Relaxed));
    let mut lost = inlet();
    assert!(lost.take(Event::Prefill {
        done: 1,
        total: 2,
        cached: 0
    }));
    let engine = std::thread::spawn(move || {
        let _lost = lost;
        panic!("on purpose");
    });
    engine.join().unwrap_err();
    assert!(is_failed(mailbox.take()));
    assert!(metrics.engine_lost.load(Ordering::Relaxed));
}

#[test]
fn the_progress_of_a_prompt_is_told_to_those_who_ask() {
    let prefill = |done| Prefill {
        done,
        total: 9,
        cached: 2,
    };
    let told = |mailbox: &Mailbox| match mailbox.take() {
        Some(Step::Prefill(prefill)) => Some(prefill),
        _ => None,
    };
    let wants = Wants {
        prefill: true,
        ..Wants::default()
    };
    let mailbox = Mailbox::new(100, wants);
    assert!(mailbox.prefill(prefill(2)));
    assert_eq!(told(&mailbox), Some(prefill(2)));
    assert_eq!(told(&mailbox), None);
    assert!(mailbox.prefill(prefill(4)) && mailbox.prefill(prefill(6)));
    assert_eq!(told(&mailbox), Some(prefill(6)));
    assert!(mailbox.push(said("", "a")));
    assert_eq!(
        told(&mailbox),
        Some(prefill(9)),
        "all of it, before the text"
    );
    assert!(matches!(mailbox.take(), Some(Step::Text(_))));
    let other = Mailbox::new(100, Wants::default());
    assert!(other.prefill(prefill(2)));
    assert_eq!(other.progress(), Progress::Prefill(prefill(2)));
    assert!(other.take().is_none());
    other.leave();
    assert!(!other.prefill(prefill(4)));
}

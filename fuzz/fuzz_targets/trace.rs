//! A trace of any bytes: refused, or read, and replayed as far as it says something.
//!
//! The fuzzer cannot guess the header, so the input is also read with one before it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use trace::{Trace, replay::replay};

const HEADER: &[u8] =
    br#"{"type":"header","schema":"paceline-trace","version":1,"paceline":"0","started":0}"#;

fuzz_target!(|data: &[u8]| {
    let _ = Trace::read(data);
    let whole = [HEADER, b"\n", data].concat();
    let trace = Trace::read(&whole[..]).expect("it has a header");
    for model in &trace.models {
        let Ok(replay) = replay(model, None) else {
            continue;
        };
        for row in &replay.rows {
            assert!(row.ms.is_finite() && row.rounds.is_finite(), "{row:?}");
            assert!(row.rounds <= row.tokens as f64 + 1e-6, "{row:?}");
            let shares = [row.extrapolated, row.untimed];
            assert!(
                shares
                    .iter()
                    .all(|share| (0.0..=1.0 + 1e-9).contains(share)),
                "{row:?}"
            );
        }
        for row in replay.by_drafter.iter().flat_map(|of| &of.rows) {
            assert!(
                row.ms_per_round.is_finite() && row.tokens_per_round >= 1.0,
                "{row:?}"
            );
            let shares = [row.extrapolated, row.untimed];
            assert!(
                shares
                    .iter()
                    .all(|share| (0.0..=1.0 + 1e-9).contains(share)),
                "{row:?}"
            );
        }
    }
});

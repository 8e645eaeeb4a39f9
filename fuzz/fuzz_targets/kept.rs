//! A file of a saved text of any bytes: refused, or what its head says fits a small memory or not, and
//! a sequence can be restored from it wherever the memory says so.
//!
//! The fuzzer cannot guess a sum, so the input is a head without its start and sum, and pieces come
//! after it: each a byte of length and as many bytes.

#![no_main]

use backend::{DeltaSpec, Reference};
use cache::{GroupPlan, KeptSize, KvLayer, KvPlan, Memory, MemoryPlan, MemorySize};
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};
use speculate::saved::file::FileReader;
use std::io::Cursor;

fuzz_target!(|data: &[u8]| {
    // As it is.
    let _ = FileReader::open(Cursor::new(data));
    let Some((length, rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (head, mut rest) = rest.split_at(length);
    let mut file = b"PACEKEPT\x01\0\0\0".to_vec();
    file.extend((length as u32).to_le_bytes());
    file.extend(head);
    let sum = Sha256::digest(&file);
    file.extend(sum);
    let mut pieces = Vec::new();
    while let [n, bytes @ ..] = rest {
        let (piece, others) = bytes.split_at(usize::from(*n).min(bytes.len()));
        let hash = Sha256::new().chain_update(sum);
        let hash = hash.chain_update((pieces.len() as u32).to_le_bytes());
        let hash = hash.chain_update((piece.len() as u64).to_le_bytes());
        file.extend((piece.len() as u32).to_le_bytes());
        file.extend(piece);
        file.extend(hash.chain_update(piece).finalize());
        pieces.push(piece);
        rest = others;
    }
    let Ok((mut reader, head)) = FileReader::open(Cursor::new(&file)) else {
        return;
    };
    for piece in &pieces {
        assert_eq!(
            reader.piece(true).expect("a right sum").as_deref(),
            Some(*piece)
        );
    }
    assert!(reader.is_at_end() && reader.piece(false).is_err());
    for has_state in [false, true] {
        restore(
            &mut memory(has_state),
            &head.text.target,
            head.text.n_pieces,
            &pieces,
        );
    }
});

/// A memory with a window, full attention and, if asked for, recurrent state.
fn memory(has_state: bool) -> Memory {
    let group = |window| GroupPlan {
        window,
        layers: vec![KvLayer {
            heads: 1,
            head_dim: 1,
            query_heads: 1,
            edge: None,
        }],
    };
    let delta = DeltaSpec {
        slots: 0,
        key_heads: 1,
        value_heads: 1,
        key_dim: 2,
        value_dim: 2,
        conv_taps: 2,
    };
    let plan = MemoryPlan {
        groups: vec![group(Some(100)), group(None)],
        delta: vec![delta; usize::from(has_state)],
    };
    let size = MemorySize {
        sequences: 2,
        context: 500,
        step_rows: 70,
        kv_format: KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    };
    Memory::new(&Reference, plan, size)
}

/// Restores what fits, as far as it can be, and goes on from there.
fn restore(memory: &mut Memory, outline: &cache::Outline, n_pieces: usize, pieces: &[&[u8]]) {
    if !memory.fits(outline, n_pieces) {
        return;
    }
    for rows in [outline.rows, outline.rows / 2, 1] {
        let rows = memory.restorable(outline, rows);
        let Ok((sequence, places)) = memory.restore(outline, rows) else {
            continue;
        };
        for (place, piece) in places.into_iter().zip(pieces) {
            if let Some(place) = place {
                let _ = memory.load_piece(&Reference, place, piece);
            }
        }
        let rows = memory.forkable(&sequence, rows);
        drop(memory.fork(&Reference, &sequence, rows));
    }
    assert_eq!(memory.pages_used().0, 0, "every page is back");
}

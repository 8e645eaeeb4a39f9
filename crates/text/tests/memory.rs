//! What stays allocated after texts were encoded.
//!
//! The only test of this file: the allocator counts for the whole process.

use std::path::Path;
use std::thread;

use peak_alloc::PeakAlloc;
use text::TextFiles;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const THREADS: usize = 4;
const TEXTS: usize = 2000;

/// A word of 200 letters that no other pair of numbers gives; it is kept only below 256
/// bytes, and a space has three.
fn new_text(thread: usize, index: usize) -> String {
    let mut state = (thread * TEXTS + index) as u64 + 1;
    (0..200)
        .map(|_| {
            // Knuth's multiplier and increment of MMIX.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            char::from(b'a' + (state >> 33) as u8 % 26)
        })
        .collect()
}

#[test]
fn memory_does_not_grow_with_texts() {
    for name in ["tiny-gemma4", "tiny-qwen3.5"] {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(name);
        let model = TextFiles::open(&folder).unwrap();
        model.encode_prompt(&new_text(0, 0)).unwrap();
        let before = ALLOCATOR.current_usage();
        // Measured while the threads live: what a thread keeps goes when it ends.
        let after = thread::scope(|scope| {
            let (done, all_done) = std::sync::mpsc::channel();
            let mut hold = Vec::new();
            for thread in 0..THREADS {
                let (model, done) = (&model, done.clone());
                let (release, wait) = std::sync::mpsc::channel::<()>();
                hold.push(release);
                scope.spawn(move || {
                    for index in 0..TEXTS {
                        model.encode_prompt(&new_text(thread, index)).unwrap();
                    }
                    done.send(()).unwrap();
                    let _ = wait.recv();
                });
            }
            for _ in 0..THREADS {
                all_done.recv().unwrap();
            }
            ALLOCATOR.current_usage()
        });
        let grown = after.saturating_sub(before);
        assert!(grown < 4 << 20, "{name}: {grown} bytes stay");
    }
}

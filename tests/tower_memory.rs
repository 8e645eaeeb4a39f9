//! What a tower takes while it looks at a picture, beside what its outline says.

use cpu::{Cpu, CpuOptions};
use models::{Frames, encode, load_tower};
use peak_alloc::PeakAlloc;
use suites::{repository, test_pixels};
use weights::Checkpoint;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

#[test]
fn a_tower_takes_what_its_outline_says() {
    for model in ["models/tiny-gemma4-vision", "models/tiny-qwen3.5-vision"] {
        let checkpoint = Checkpoint::open(&repository(model)).unwrap();
        let b = Cpu::new(CpuOptions::default()).unwrap();
        let tower = load_tower(&b, &checkpoint).unwrap();
        let outline = tower.outline();
        let side = outline.patch * outline.merge;
        let (height, width) = (20 * side, 8 * side);
        let rgb = test_pixels(1, height, width);
        let frames = Frames {
            height,
            width,
            rgb: &rgb,
        };
        MEMORY.reset_peak_usage();
        let before = MEMORY.current_usage();
        encode(&*tower, &b, &frames).unwrap();
        let took = (MEMORY.peak_usage() - before) as u64;
        let said = outline.step_bytes(160);
        println!("{model}: {took} bytes, {said} said");
        assert!(
            took <= said && said < 2 * took,
            "{model}: {took} bytes, {said} said"
        );
    }
}

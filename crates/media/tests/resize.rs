//! Resizing has the bits of the public processors: `tests/golden/resize.py` wrote the checksums with
//! torchvision.

use media::Frame;

/// The picture that the script draws.
fn picture(height: usize, width: usize) -> Frame {
    let mut state = (height * 65_537 + width) as u32;
    let values = (0..height * width * 3).map(|i| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let x = i / 3 % width;
        match () {
            () if x.is_multiple_of(7) => 255,
            () if x.is_multiple_of(11) => 0,
            () => (state >> 24) as u8,
        }
    });
    Frame::new(height, width, values.collect())
}

/// The FNV-1a hash of 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[test]
fn sizes_have_the_bits_of_torchvision() {
    let lines = include_str!("resize.tsv").lines();
    let mut n = 0;
    for line in lines {
        let fields: Vec<&str> = line.split('\t').collect();
        let [height, width, to_height, to_width] = [0, 1, 2, 3].map(|i| fields[i].parse().unwrap());
        let resized = picture(height, width).resized(to_height, to_width);
        let hash = format!("{:016x}", fnv(resized.rgb()));
        assert_eq!(
            hash, fields[4],
            "{height}x{width} to {to_height}x{to_width}"
        );
        n += 1;
    }
    assert!(n >= 50, "{n}");
}

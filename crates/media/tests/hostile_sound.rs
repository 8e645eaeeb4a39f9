//! Sounds that mean harm: what they may cost in memory is bounded by the limits alone.

mod common;
#[path = "common/memory.rs"]
mod memory;

use common::{Bits, ogg, vorbis_head};
use media::{Bound, MediaError, Sound, SoundLimits, decode_sound};
use memory::{alone, measured};

/// Bytes of headers and tags that are read before a sound.
const TAGS: usize = 2 << 20;

fn limits() -> SoundLimits {
    SoundLimits {
        seconds: 2,
        ..SoundLimits::default()
    }
}

/// Bytes that a decoder may take within [`limits`] beside the file: its samples three times while they
/// grow, what libraries make of tags, and codebooks.
fn cage() -> usize {
    let samples = limits().seconds as usize * *limits().rates.end() as usize;
    3 * 4 * samples + 64 * TAGS + (32 << 20)
}

/// What decoding `file` gives, and the most memory that it took beside the file.
fn read(file: Vec<u8>) -> (Result<Sound, MediaError>, usize) {
    measured(|| decode_sound(file, 16_000, &limits()))
}

fn is_too_tagged(decoded: &Result<Sound, MediaError>) -> bool {
    matches!(
        decoded,
        Err(MediaError::TooLarge {
            bound: Bound::Tags,
            ..
        })
    )
}

/// A Vorbis file of one channel with this comment and setup, and some packets of nothing.
fn vorbis(comment: Vec<u8>, setup: Vec<u8>) -> Vec<u8> {
    let silence = vec![vec![0; 8]; 4];
    ogg(&[vec![vorbis_head(), comment, setup], silence].concat())
}

/// A comment of Vorbis with `n` tags of one letter without a text.
fn tags(n: u32) -> Vec<u8> {
    let mut tags = [0u32, n].map(u32::to_le_bytes).concat();
    tags.extend(b"\x02\0\0\0A=".repeat(n as usize));
    tags
}

#[test]
fn codebooks_that_promise_too_much_cost_nothing() {
    let _alone = alone();
    let mut bits = Bits::default();
    bits.put(255, 8);
    for _ in 0..256 {
        bits.put(0x56_4342, 24);
        bits.put(24, 16);
        bits.put(131_072, 24);
        // All code words have 17 bits.
        bits.put(1, 1);
        bits.put(16, 5);
        bits.put(131_072, 18);
        // Vectors of one number each, of one bit.
        bits.put(1, 4);
        bits.put(0, 64);
        bits.put(0, 4);
        bits.put(0, 2);
    }
    let setup = [b"\x05vorbis".to_vec(), bits.bytes()].concat();
    assert!(setup.len() < 8 << 10, "{}", setup.len());
    let comment = [&b"\x03vorbis"[..], &tags(0), &[1]].concat();
    let (decoded, took) = read(vorbis(comment, setup));
    let error = decoded.unwrap_err().to_string();
    assert!(error.contains("33554432 entries"), "{error}");
    assert!(took < 1 << 20, "{took}");
}

#[test]
fn tags_take_a_bounded_part_of_memory() {
    let _alone = alone();
    let n = 3_000_000;
    let chunk = |name: &[u8], data: &[u8]| {
        let length = (data.len() as u32).to_le_bytes();
        [name, &length, data].concat()
    };
    let list = chunk(
        b"LIST",
        &[&b"INFO"[..], &b"ICMT\0\0\0\0".repeat(n)].concat(),
    );
    let format = chunk(b"fmt ", b"\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0");
    let data = chunk(b"data", &[0; 64]);
    let body = [&b"WAVE"[..], &format, &list, &data].concat();
    let wav = chunk(b"RIFF", &body);
    let block = |kind: u8, data: &[u8]| {
        let length = (data.len() as u32).to_be_bytes();
        [&[kind][..], &length[1..], data].concat()
    };
    let mut stream = vec![0; 34];
    stream[..4].copy_from_slice(&[0x10, 0, 0x10, 0]);
    stream[10..14].copy_from_slice(&[0x03, 0xe8, 0, 0xf0]);
    // Blocks have 24 bits for their length.
    let comment = block(4, &tags(2_700_000));
    let flac = [
        &b"fLaC"[..],
        &block(0, &stream),
        &comment,
        &block(0x84, &tags(1)),
    ]
    .concat();
    let comment = [&b"\x03vorbis"[..], &tags(2_500_000), &[1]].concat();
    let setup = b"\x05vorbis".to_vec();
    for (name, file) in [
        ("wav", wav),
        ("flac", flac),
        ("ogg", vorbis(comment, setup)),
    ] {
        let (decoded, took) = read(file);
        assert!(is_too_tagged(&decoded), "{name}: {decoded:?}");
        assert!(took <= cage(), "{name} takes {took} of {}", cage());
    }
    // A tag of four gigabytes in a block of some bytes.
    let long = [0u32, 1, u32::MAX - 9].map(u32::to_le_bytes).concat();
    let flac = [&b"fLaC"[..], &block(0, &stream), &block(0x84, &long)].concat();
    let (decoded, took) = read(flac);
    assert!(matches!(decoded, Err(MediaError::Broken(_))), "{decoded:?}");
    assert!(took < 1 << 20, "{took}");
}

#[test]
fn an_odd_rate_takes_no_more_than_its_samples() {
    let _alone = alone();
    for rate in [191_999u32, 100_003, 4_001] {
        let samples = rate as usize * 2;
        let mut wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0".to_vec();
        wav.extend(rate.to_le_bytes());
        wav.extend((rate * 2).to_le_bytes());
        wav.extend(b"\x02\0\x10\0data");
        wav.extend((samples as u32 * 2).to_le_bytes());
        wav[4..8].copy_from_slice(&(samples as u32 * 2 + 36).to_le_bytes());
        wav.resize(wav.len() + samples * 2, 0);
        let (decoded, took) = read(wav);
        assert_eq!(decoded.unwrap().samples().len(), 32_000);
        assert!(took < 3 * 4 * samples + (4 << 20), "{rate}: {took}");
    }
}

//! Sound: what files hold, at which rate it comes out, and what is done with those that mean harm.
//! `tests/golden/sounds.py` wrote the files and what the public processors read in them.

use std::f64::consts::PI;
use std::time::Duration;

use media::{Bound, MediaError, Sound, SoundLimits, decode_sound};

fn read(bytes: &[u8]) -> Result<Sound, MediaError> {
    decode_sound(bytes.to_vec(), 16_000, &SoundLimits::default())
}

fn file(name: &str) -> Vec<u8> {
    let folder = format!("{}/tests/sound", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(format!("{folder}/{name}")).unwrap()
}

/// A WAV file of `data`, whose format has `tag`.
fn wav(tag: u16, channels: u16, rate: u32, bits: u16, data: &[u8]) -> Vec<u8> {
    wav_that_states(tag, channels, rate, bits, data, data.len() as u32)
}

fn wav_that_states(
    tag: u16,
    channels: u16,
    rate: u32,
    bits: u16,
    data: &[u8],
    bytes: u32,
) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut out = b"RIFF".to_vec();
    out.extend(bytes.saturating_add(36).to_le_bytes());
    out.extend(b"WAVEfmt \x10\0\0\0");
    out.extend(tag.to_le_bytes());
    out.extend(channels.to_le_bytes());
    out.extend(rate.to_le_bytes());
    out.extend(rate.wrapping_mul(u32::from(block)).to_le_bytes());
    out.extend(block.to_le_bytes());
    out.extend(bits.to_le_bytes());
    out.extend(b"data");
    out.extend(bytes.to_le_bytes());
    out.extend(data);
    out
}

/// A WAV file of 16 bits, of one channel.
fn wav_of(rate: u32, samples: impl IntoIterator<Item = i16>) -> Vec<u8> {
    let data: Vec<u8> = samples.into_iter().flat_map(i16::to_le_bytes).collect();
    wav(1, 1, rate, 16, &data)
}

#[test]
fn one_channel_at_the_wanted_rate_keeps_its_samples() {
    let values: Vec<i16> = (0..4000).map(|i| (i * 7919) as i16).collect();
    let sound = read(&wav_of(16_000, values.clone())).unwrap();
    let want: Vec<f32> = values.iter().map(|&v| f32::from(v) / 32768.0).collect();
    assert!(sound.samples() == want, "bit for bit");
    assert_eq!((sound.rate(), sound.seconds()), (16_000, 0.25));
    let floats: Vec<f32> = values.iter().map(|&v| f32::from(v) / 30_000.0).collect();
    let bytes: Vec<u8> = floats.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert!(read(&wav(3, 1, 16_000, 32, &bytes)).unwrap().samples() == floats);
}

#[test]
fn every_width_of_samples_is_read_and_channels_become_their_mean() {
    let unsigned = [0, 128, 192, 255];
    let sound = read(&wav(1, 1, 16_000, 8, &unsigned)).unwrap();
    assert_eq!(sound.samples(), [-1.0, 0.0, 0.5, 127.0 / 128.0]);
    let deep = [0, 0, 0x40, 0, 0, 0xc0, 1, 0, 0];
    let sound = read(&wav(1, 1, 16_000, 24, &deep)).unwrap();
    assert_eq!(sound.samples(), [0.5, -0.5, 1.0 / 8_388_608.0]);
    let deepest: Vec<u8> = [1i32 << 30, i32::MIN].map(i32::to_le_bytes).concat();
    let sound = read(&wav(1, 1, 16_000, 32, &deepest)).unwrap();
    assert_eq!(sound.samples(), [0.5, -1.0]);
    let stereo: Vec<u8> = [8192i16, 16_384, -8192, 8192, 1, 2]
        .map(i16::to_le_bytes)
        .concat();
    let sound = read(&wav(1, 2, 16_000, 16, &stereo)).unwrap();
    assert_eq!(sound.samples(), [0.375, 0.0, 1.5 / 32_768.0]);
    // Three channels, as an extensible format has them too.
    let three: Vec<u8> = [3000i16, 6000, 9000].map(i16::to_le_bytes).concat();
    let sound = read(&wav(1, 3, 16_000, 16, &three)).unwrap();
    assert_eq!(sound.samples(), [6000.0 / 32_768.0]);
}

#[test]
fn files_hold_what_the_public_processors_read_in_them() {
    for line in include_str!("sound/samples.tsv").lines() {
        let [name, n, values] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("three fields: {line}");
        };
        let sound = read(&file(name)).unwrap_or_else(|e| panic!("{name} {e}"));
        assert_eq!(sound.samples().len(), n.parse::<usize>().unwrap(), "{name}");
        let want = values.split(' ').map(|v| v.parse::<f32>().unwrap());
        let far = sound.samples().iter().step_by(16).zip(want);
        let far: Vec<f32> = far.map(|(got, want)| (got - want).abs()).collect();
        let most = |far: &[f32]| far.iter().copied().fold(0.0, f32::max);
        // Where nothing is resampled, decoders agree but for their own rounding.
        let inside = match name {
            "mono.flac" => 1e-7,
            "mono.ogg" => 1e-5,
            _ => 1e-4,
        };
        assert!(
            most(&far[8..far.len() - 8]) < inside,
            "{name}: {:?}",
            most(&far)
        );
        // The kernels of two resamplers differ where the sound begins and ends.
        assert!(most(&far) < 0.05, "{name}: {:?}", most(&far));
    }
}

/// A tone of amplitude 1.
fn tone(hertz: f64, rate: u32, n: usize) -> Vec<f32> {
    let at = |i: usize| (2.0 * PI * hertz * i as f64 / f64::from(rate) + 0.3).sin() as f32;
    (0..n).map(at).collect()
}

#[test]
fn resampling_keeps_what_both_rates_can_hold_and_nothing_else() {
    for (from, to) in [
        (8_000, 16_000),
        (11_025, 16_000),
        (22_050, 16_000),
        (44_100, 16_000),
        (48_000, 16_000),
        (16_001, 16_000),
        (192_000, 16_000),
        (16_000, 44_100),
    ] {
        let lower = f64::from(from.min(to)) / 2.0;
        let n = from as usize / 4;
        let inside = |sound: &Sound| {
            let n = sound.samples().len();
            let edge = (to as f64 * 100.0 / (2.0 * lower)) as usize;
            (edge..n - edge, n)
        };
        for share in [0.0, 0.01, 0.31, 0.7, 0.9, 0.91] {
            let sound = Sound::new(from, tone(share * lower, from, n)).resampled(to);
            let (range, made) = inside(&sound);
            assert_eq!(
                made,
                (n as f64 * f64::from(to) / f64::from(from)).round() as usize
            );
            let want = tone(share * lower, to, made);
            for i in range {
                let far = (sound.samples()[i] - want[i]).abs();
                assert!(far < 2e-6, "{from} to {to}, {share} of {lower} Hz: {far}");
            }
        }
        for above in [1.001, 1.2, 2.0, 2.7] {
            let hertz = above * lower;
            if hertz >= f64::from(from) / 2.0 {
                continue;
            }
            let sound = Sound::new(from, tone(hertz, from, n)).resampled(to);
            let (range, _) = inside(&sound);
            for i in range {
                let left = sound.samples()[i].abs();
                assert!(left < 2e-6, "{from} to {to}, {hertz} Hz: {left}");
            }
        }
    }
}

#[test]
fn a_sound_has_at_least_one_sample() {
    for n in 1..5 {
        let sound = Sound::new(48_000, vec![0.5; n]).resampled(16_000);
        assert_eq!(sound.samples().len(), ((n + 1) / 3).max(1), "{n}");
    }
    assert_eq!(
        read(&wav_of(16_000, [])),
        Err(MediaError::Broken("it has no samples".into()))
    );
}

#[test]
fn what_is_no_sound_is_refused() {
    for bytes in [
        &b""[..],
        b"R",
        b"\x89PNG\r\n\x1a\n\0\0\0\x0d",
        b"ID3",
        b"ftypM4A ",
        // Frames of layer 2, and of AAC.
        b"\xff\xfd\x90\x04\0\0\0\0",
        b"\xff\xf1\x50\x80\0\0\0\0",
    ] {
        assert_eq!(read(bytes), Err(MediaError::UnknownSound), "{bytes:?}");
    }
    // A codec that is not read: ADPCM.
    let error = read(&wav(2, 1, 16_000, 4, &[0; 64])).unwrap_err();
    assert!(
        matches!(error, MediaError::UnknownSound | MediaError::Broken(_)),
        "{error:?}"
    );
    let text = MediaError::UnknownSound.to_string();
    assert!(text.contains("WAV, FLAC, MP3 or Ogg Vorbis"), "{text}");
}

#[test]
fn tags_before_a_sound_are_skipped() {
    let tag = |size: usize| {
        let mut tag = b"ID3\x04\0\0\0\0".to_vec();
        tag.extend([(size >> 7) as u8, (size & 0x7f) as u8]);
        // What looks like the frames of another sound.
        tag.extend([0xff, 0xfb, 0x90, 0x64].iter().cycle().take(size));
        tag
    };
    for name in ["mono.mp3", "stereo.flac"] {
        let plain = read(&file(name)).unwrap();
        let tagged = [tag(500), tag(3), file(name)].concat();
        assert_eq!(read(&tagged).unwrap(), plain, "{name}");
    }
    // A tag that is longer than the file.
    assert_eq!(read(&tag(500)[..300]), Err(MediaError::UnknownSound));
}

#[test]
fn every_bound_holds() {
    let limits = SoundLimits {
        bytes: 100_000,
        seconds: 2,
        channels: 2,
        rates: 8_000..=48_000,
        ..SoundLimits::default()
    };
    let decode = |bytes: Vec<u8>| decode_sound(bytes, 16_000, &limits);
    for (bytes, bound, most, found) in [
        (vec![0; 100_001], Bound::Bytes, 100_000, 100_001),
        (wav_of(8_000, vec![0; 16_001]), Bound::Seconds, 2, 3),
        (wav(1, 3, 16_000, 16, &[0; 60]), Bound::Channels, 2, 3),
        (wav_of(48_001, [0; 9]), Bound::SampleRate, 48_000, 48_001),
    ] {
        let expected = MediaError::TooLarge { bound, most, found };
        assert_eq!(decode(bytes), Err(expected));
    }
    assert!(decode(wav_of(8_000, vec![0; 16_000])).is_ok());
    let error = decode(wav_of(7_999, [0; 9])).unwrap_err();
    assert!(
        error.to_string().contains("7999 samples a second"),
        "{error}"
    );
    let hasty = SoundLimits {
        time: Duration::ZERO,
        ..limits.clone()
    };
    assert_eq!(
        decode_sound(wav_of(16_000, [0; 9]), 16_000, &hasty),
        Err(MediaError::TooSlow(Duration::ZERO))
    );
}

#[test]
fn a_header_that_promises_too_much_is_refused() {
    // Ten hours in a few bytes.
    let long = wav_that_states(1, 1, 16_000, 16, &[0; 64], 16_000 * 2 * 36_000);
    let error = read(&long).unwrap_err();
    assert!(
        matches!(
            error,
            MediaError::TooLarge {
                bound: Bound::Seconds,
                ..
            }
        ),
        "{error:?}"
    );
    let cut = wav_that_states(1, 1, 16_000, 16, &[0; 64], 100);
    let error = read(&cut).unwrap_err();
    assert!(error.to_string().contains("32 of 50 samples"), "{error}");
    // What writes to a pipe does not know the length.
    let piped = wav_that_states(1, 1, 16_000, 16, &[0; 64], u32::MAX);
    assert_eq!(read(&piped).unwrap().samples().len(), 32);
    let piped = wav_that_states(1, 1, 16_000, 16, &[0; 64], 0x7fff_ff00);
    assert_eq!(read(&piped).unwrap().samples().len(), 32);
}

#[test]
fn samples_that_are_no_numbers_are_refused() {
    for odd in [f32::NAN, f32::INFINITY, -1e30] {
        let bytes = [0.5, odd].map(f32::to_le_bytes).concat();
        let error = read(&wav(3, 1, 16_000, 32, &bytes)).unwrap_err();
        assert!(error.to_string().contains("out of range"), "{odd}: {error}");
    }
}

#[test]
fn what_is_cut_off_or_damaged_is_an_error_or_a_sound() {
    let names = ["stereo.flac", "mono.mp3", "stereo.mp3", "stereo.ogg"];
    let mut files: Vec<_> = names.map(|name| (name, file(name))).into();
    files.push(("wav", wav_of(16_000, (0..3000).map(|i| i * 9))));
    for (name, bytes) in files {
        let whole = read(&bytes).unwrap().samples().len();
        let mut broken = 0;
        for percent in 0..100 {
            let cut = &bytes[..bytes.len() * percent / 100];
            match read(cut) {
                Err(MediaError::UnknownSound | MediaError::Broken(_)) => broken += 1,
                // Streams end where they end.
                Ok(sound) => {
                    assert!(
                        !name.ends_with("flac") && name != "wav",
                        "{name}: {percent} %"
                    );
                    assert!(sound.samples().len() <= whole, "{name}");
                }
                Err(other) => panic!("{name} at {percent} %: {other:?}"),
            }
        }
        assert!(broken >= 1, "{name}: {broken}");
        for at in (0..bytes.len()).step_by(bytes.len() / 397 + 1) {
            let mut odd = bytes.clone();
            odd[at] ^= 0x55;
            let read = read(&odd);
            let is_slow = matches!(read, Err(MediaError::TooSlow(_)));
            assert!(!is_slow, "{name}: byte {at}");
        }
    }
}

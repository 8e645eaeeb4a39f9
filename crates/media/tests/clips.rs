//! Clips: which frames of them are looked at, and what is done with those that mean harm.

mod common;

use std::time::Duration;

use common::{ByThrees, gif, gray_frame, png, webp};
use media::{Bound, Clip, Limits, MediaError, VideoTools, decode_clip, decode_frames};

fn read(bytes: &[u8], limits: &Limits) -> Result<Clip, MediaError> {
    decode_clip(bytes.to_vec(), ByThrees(1), limits, &VideoTools::default())
}

/// The first pixel of each frame.
fn grays(clip: &Clip) -> Vec<u8> {
    clip.frames().iter().map(|frame| frame.rgb()[0]).collect()
}

#[test]
fn an_animation_has_all_of_its_frames_and_a_rate() {
    let usual = Limits::default();
    for file in [
        gif(&[(10, 5), (200, 5), (90, 10)]),
        webp(&[(10, 50), (200, 50), (90, 100)]),
    ] {
        let clip = read(&file, &usual).unwrap();
        assert_eq!(
            (grays(&clip), clip.numbers()),
            (vec![10, 200, 90], &[0, 1, 2][..])
        );
        assert_eq!(clip.fps(), Some(3.0 / 0.2));
    }
    // Browsers show a frame without a time for a tenth of a second.
    let untimed = read(&gif(&[(10, 0), (200, 1)]), &usual).unwrap();
    assert_eq!(untimed.fps(), Some(10.0));
    // A clip of one frame has no rate.
    for single in [gif(&[(10, 5)]), png(20, 10, 10)] {
        let single = read(&single, &usual).unwrap();
        assert_eq!((grays(&single), single.fps()), (vec![10], None));
    }
}

#[test]
fn frames_that_nobody_looks_at_are_not_kept() {
    let frames: Vec<(u8, u32)> = (0..30).map(|i| (8 * i, 5)).collect();
    // Room for the pixels of ten frames, of which each has 20 by 10.
    let limits = Limits {
        clip_pixels: 2000,
        ..Limits::default()
    };
    let rule = ByThrees(3);
    let clip = decode_clip(gif(&frames), rule, &limits, &VideoTools::default()).unwrap();
    let numbers: Vec<usize> = (0..30).step_by(3).collect();
    assert_eq!(clip.numbers(), numbers);
    let expected: Vec<u8> = numbers.iter().map(|&n| 8 * n as u8).collect();
    assert_eq!(grays(&clip), expected);
    assert_eq!(clip.fps(), Some(20.0));
}

#[test]
fn frames_may_come_as_pictures() {
    let usual = Limits::default();
    let read = |files| decode_frames(files, Some(2.0), ByThrees(3), &usual);
    let clip = read(vec![png(20, 10, 1), gif(&[(7, 5)]), png(20, 10, 9)]).unwrap();
    // All of them are looked at.
    assert_eq!(
        (grays(&clip), clip.numbers()),
        (vec![1, 7, 9], &[0, 1, 2][..])
    );
    assert_eq!(clip.fps(), Some(2.0));
    let other = read(vec![png(20, 10, 1), png(10, 20, 1)]);
    assert_eq!(other, Err(MediaError::OtherSize { frame: 1 }));
    let broken = read(vec![png(20, 10, 1), b"nothing".to_vec()]).unwrap_err();
    assert!(
        broken.to_string().contains("frame 1 is in no known format"),
        "{broken}"
    );
    assert!(read(vec![]).is_err());
}

#[test]
fn every_bound_of_a_clip_holds() {
    let limits = Limits {
        frames: 3,
        seconds: 2,
        clip_pixels: 600,
        ..Limits::default()
    };
    let frame = (1, 5);
    for (bytes, bound, most, found) in [
        (gif(&[frame; 4]), Bound::Frames, 3, 4),
        (gif(&[(1, 150); 3]), Bound::Seconds, 2, 3),
    ] {
        let expected = MediaError::TooLarge { bound, most, found };
        assert_eq!(read(&bytes, &limits), Err(expected));
    }
    assert!(read(&gif(&[frame; 3]), &limits).is_ok());
    let limits = Limits {
        clip_pixels: 599,
        ..limits
    };
    let expected = MediaError::TooLarge {
        bound: Bound::ClipPixels,
        most: 599,
        found: 600,
    };
    assert_eq!(read(&gif(&[frame; 3]), &limits), Err(expected));
    let hasty = Limits {
        time: Duration::ZERO,
        ..Limits::default()
    };
    let error = read(&gif(&[frame]), &hasty).unwrap_err();
    assert_eq!(error, MediaError::TooSlow(Duration::ZERO));
    // What the rule refuses is said as it says it.
    let refused = decode_clip(
        gif(&[frame]),
        ByThrees(0),
        &Limits::default(),
        &VideoTools::default(),
    );
    assert_eq!(refused, Err(MediaError::Size("no size".into())));
}

#[test]
fn a_clip_that_is_cut_off_or_damaged_is_an_error_or_a_clip() {
    let limits = Limits {
        frames: 8,
        pixels: 1 << 16,
        ..Limits::default()
    };
    let file = gif(&[(10, 5), (200, 5), (90, 10)]);
    let mut shown = 0;
    for cut in 0..file.len() {
        assert!(read(&file[..cut], &limits).is_err(), "{cut} bytes");
        let mut odd = file.clone();
        odd[cut] ^= 0x55;
        shown += read(&odd, &limits).map_or(0, |clip| clip.frames().len().min(1));
    }
    assert!(shown > 5, "{shown} are clips all the same");
    assert_eq!(read(b"", &limits), Err(MediaError::UnknownClip));
    assert_eq!(
        read(b"RIFF\0\0\0\0AVI LIST", &limits),
        Err(MediaError::UnknownClip)
    );
    assert_eq!(gray_frame(1, 1, 5).rgb(), [5; 3]);
}

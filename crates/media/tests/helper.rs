//! MP4 and WebM by programs: ones that these tests write, and `ffmpeg` where it is installed.

#![cfg(unix)]

mod common;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::ByThrees;
use media::{Bound, Clip, Limits, MediaError, VideoTools, decode_clip};

/// What the first bytes of an MP4 are.
const MP4: &[u8] = b"\0\0\0\x18ftypisom....";

/// A folder of this test that is deleted at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("media-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// A program in it that runs these lines of a shell. Another process writes it: what this one has open for writing,
    /// a process that another test starts meanwhile has open as well, and what is open for writing cannot be run.
    fn program(&self, name: &str, lines: &str) -> PathBuf {
        let path = self.0.join(name);
        let mut writer = Command::new("sh")
            .args(["-c", "cat > \"$0\" && chmod 700 \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = writer.stdin.take().unwrap();
        write!(stdin, "#!/bin/sh\n{lines}\n").unwrap();
        drop(stdin);
        assert!(writer.wait().unwrap().success());
        path
    }

    fn tools(&self, ffprobe: &str, ffmpeg: &str) -> VideoTools {
        VideoTools {
            ffprobe: self.program("ffprobe", ffprobe),
            ffmpeg: self.program("ffmpeg", ffmpeg),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn read(tools: &VideoTools, limits: &Limits) -> Result<Clip, MediaError> {
    decode_clip(MP4.to_vec(), ByThrees(3), limits, tools)
}

/// Says that a video has so many frames.
fn frames(n: usize) -> String {
    format!("echo avg_frame_rate=30000/1001; echo nb_read_packets={n}")
}

/// Writes pictures of 2 by 1 pixels.
fn pictures(n: usize) -> String {
    format!(
        "i=0; while [ $i -lt {n} ]; do printf 'P6\\n2 1\\n255\\nabc'; printf \"$i$i$i\"; i=$((i+1)); done"
    )
}

#[test]
fn a_program_is_given_the_file_and_says_what_is_in_it() {
    let folder = Folder::new("given");
    let log = folder.0.join("log");
    let note = |name: &str| {
        let log = log.display();
        format!("echo {name} \"$@\" >> {log}; head -c 12 >> {log}; echo >> {log};")
    };
    let tools = folder.tools(
        &(note("ffprobe") + &frames(7)),
        &(note("ffmpeg") + &pictures(3)),
    );
    let clip = read(&tools, &Limits::default()).unwrap();
    assert_eq!(clip.numbers(), [0, 3, 6]);
    assert_eq!(clip.fps(), Some(30000.0 / 1001.0));
    let last: Vec<u8> = clip.frames().iter().map(|frame| frame.rgb()[5]).collect();
    assert_eq!(last, *b"012");
    let log = fs::read(&log).unwrap();
    let log = String::from_utf8_lossy(&log);
    // The file comes over stdin, from its start each time.
    assert_eq!(log.matches("ftypisom").count(), 2, "{log}");
    for needed in [
        "-nostdin",
        "-protocol_whitelist file",
        "-f mov -i file:/dev/stdin",
        "select=eq(n\\,0)+eq(n\\,3)+eq(n\\,6)",
        "-frames:v 3",
        "pipe:1",
    ] {
        assert!(log.contains(needed), "{needed}: {log}");
    }
}

#[test]
fn without_the_programs_the_error_says_what_to_do() {
    let tools = VideoTools {
        ffmpeg: "/nonexistent/ffmpeg".into(),
        ffprobe: "/nonexistent/ffprobe".into(),
    };
    assert!(!tools.are_there());
    let error = read(&tools, &Limits::default()).unwrap_err().to_string();
    let expected = "MP4 needs the program ffmpeg on the PATH; send an animated GIF or WebP, or a list of frames";
    assert_eq!(error, expected);
}

#[test]
fn what_a_program_does_wrong_is_an_error() {
    let usual = Limits::default();
    for (probe, decode, told) in [
        ("echo no moov atom >&2; exit 1", "exit 0", "no moov atom"),
        ("echo nb_read_packets=N/A", "exit 0", "it has no video"),
        (&*frames(4), "exit 3", "did not say why"),
        (&*frames(4), "exit 0", "it has no frames"),
        (&*frames(4), "echo hello world and more", "wrote no picture"),
        (&*frames(4), "printf 'P6\\n2 1\\n255\\nab'", "broken"),
        (
            &*frames(4),
            "printf 'P6\\n99999 1\\n255\\n'; cat /dev/zero",
            "is too large: 16384 pixels a side",
        ),
        ("cat /dev/zero", "exit 0", "broken"),
    ] {
        let folder = Folder::new("wrong");
        let error = read(&folder.tools(probe, decode), &usual).unwrap_err();
        assert!(
            error.to_string().contains(told),
            "{probe}; {decode}: {error}"
        );
    }
}

#[test]
fn a_video_keeps_to_the_bounds() {
    let folder = Folder::new("bounds");
    let limits = Limits {
        frames: 100,
        seconds: 10,
        clip_pixels: 7,
        ..Limits::default()
    };
    for (n, bound, most, found) in [(101, Bound::Frames, 100, 101), (9, Bound::ClipPixels, 7, 6)] {
        let error = read(&folder.tools(&frames(n), &pictures(9)), &limits);
        match bound {
            Bound::Frames => assert_eq!(error, Err(MediaError::TooLarge { bound, most, found })),
            // Three pictures of two pixels.
            _ => assert!(error.is_ok(), "{error:?}"),
        }
    }
    let slow = "echo avg_frame_rate=1/1; echo nb_read_packets=12";
    let expected = MediaError::TooLarge {
        bound: Bound::Seconds,
        most: 10,
        found: 12,
    };
    assert_eq!(read(&folder.tools(slow, "exit 0"), &limits), Err(expected));
    // A program that writes more than it was asked for is stopped.
    let endless = format!("while true; do {}; done", pictures(1));
    let clip = read(&folder.tools(&frames(7), &endless), &Limits::default()).unwrap();
    assert_eq!(clip.frames().len(), 3);
}

/// Whether the process whose number is in `file` lives.
fn is_alive(file: &Path) -> bool {
    let id = fs::read_to_string(file).unwrap();
    let mut asked = Command::new("kill");
    asked.args(["-0", id.trim()]).stderr(Stdio::null());
    asked.status().unwrap().success()
}

#[test]
fn a_program_is_killed_at_the_deadline() {
    let folder = Folder::new("deadline");
    let id = folder.0.join("id");
    // It writes nothing, or closes what it writes to, and stays.
    for stay in ["exec sleep 600", "exec sleep 600 >&- 2>&-"] {
        let probe = format!("echo $$ > {}; {stay}", id.display());
        // On a busy machine the program may not have begun by then.
        let mut time = Duration::from_millis(500);
        loop {
            let limits = Limits {
                time,
                ..Limits::default()
            };
            let error = read(&folder.tools(&probe, "exit 0"), &limits).unwrap_err();
            assert_eq!(error, MediaError::TooSlow(limits.time));
            let has_begun = fs::read_to_string(&id).is_ok_and(|id| id.ends_with('\n'));
            if has_begun || time > Duration::from_secs(30) {
                break;
            }
            time *= 4;
        }
        let patience = Instant::now() + Duration::from_secs(60);
        while is_alive(&id) {
            assert!(Instant::now() < patience, "it lives on after `{stay}`");
            std::thread::sleep(Duration::from_millis(10));
        }
        fs::remove_file(&id).unwrap();
    }
}

#[test]
fn ffmpeg_decodes_the_frames_that_are_wanted() {
    let tools = VideoTools::default();
    if !tools.are_there() {
        return eprintln!("!!! SKIPPED, no video is decoded: there is no ffmpeg");
    }
    let folder = Folder::new("ffmpeg");
    for (name, codec) in [("a.mp4", "mpeg4"), ("b.webm", "libvpx")] {
        let path = folder.0.join(name);
        // Frames get brighter from one to the next.
        let made = Command::new("ffmpeg")
            .args(["-nostdin", "-v", "error", "-f", "lavfi", "-i"])
            .arg("color=black:s=64x48:r=10:d=3,format=gray,geq=lum='8*N+8'")
            .args(["-c:v", codec, "-pix_fmt", "yuv420p"])
            .arg(&path)
            .status()
            .unwrap();
        if !made.success() {
            eprintln!("!!! SKIPPED: this ffmpeg writes no {codec}");
            continue;
        }
        let file = fs::read(&path).unwrap();
        let rule = ByThrees(3);
        let clip = decode_clip(file.clone(), rule, &Limits::default(), &tools).unwrap();
        assert_eq!(clip.numbers(), (0..30).step_by(3).collect::<Vec<_>>());
        assert_eq!(clip.fps(), Some(10.0));
        let frame = &clip.frames()[0];
        assert_eq!((frame.height(), frame.width()), (48, 64));
        let grays: Vec<u8> = clip.frames().iter().map(|f| f.rgb()[3000]).collect();
        assert!(grays.is_sorted() && grays[9] > grays[0] + 150, "{grays:?}");
        // Steps are as large as three frames are apart.
        let steps = grays.windows(2).map(|two| two[1] - two[0]);
        assert!(
            steps.clone().all(|step| (15..45).contains(&step)),
            "{grays:?}"
        );
        let decode = |percent: usize| {
            let cut = file[..file.len() * percent / 100].to_vec();
            match decode_clip(cut, ByThrees(3), &Limits::default(), &tools) {
                // A stream shows what there is of it.
                Ok(cut) => assert!(cut.frames().len() <= clip.frames().len()),
                Err(MediaError::UnknownClip | MediaError::Broken(_)) => {}
                Err(other) => panic!("{name} at {percent} %: {other:?}"),
            }
        };
        // Most of the time is the start of the programs.
        std::thread::scope(|scope| {
            for first in 0..4 {
                scope.spawn(move || (first..100).step_by(4).for_each(decode));
            }
        });
    }
}

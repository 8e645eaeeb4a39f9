//! MP4 and WebM by the programs `ffmpeg` and `ffprobe`, where there are any.
//!
//! ```text
//! bytes ─→ temporary file, unlinked ─ stdin ─→ ffprobe ─ stdout ─→ frames, and how many a second
//!                                   └ stdin ─→ ffmpeg  ─ stdout ─→ PPM pictures of the chosen frames
//! ```
//!
//! A program is given a fixed list of arguments, in which nothing comes from the file but numbers
//! that were parsed here. It reads the file from its stdin, which is a file so that it can go back and
//! forth in it, may open nothing else but files, with the demuxer that the first bytes call for, and is
//! killed at the deadline. What it writes is bounded: the header of a picture before its pixels.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::clip::{Kept, check_length};
use crate::deadline::Deadline;
use crate::decode::check_size;
use crate::{Clip, ClipRule, Frame, Limits, MediaError};

/// Bytes of what a program says of a video, or of what is wrong with it, at most.
const WORDS_MAX: u64 = 16 << 10;
/// Bytes that a program may allocate at once.
const ALLOCATION_MAX: &str = "1073741824";
/// Between two looks at whether a program that writes no more has ended.
const POLL: Duration = Duration::from_millis(2);
/// How long what is wrong is waited for after a program has ended.
const WORDS_TIME: Duration = Duration::from_secs(1);
/// The file that a program reads.
const INPUT: &str = "file:/dev/stdin";

/// A container of video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Container {
    /// The name of the container, for messages.
    name: &'static str,
    /// The name of the demuxer of `ffmpeg` that reads the container.
    demuxer: &'static str,
}

impl Container {
    /// The container that `bytes` begin like.
    pub(crate) fn of(bytes: &[u8]) -> Option<Container> {
        let of = |name, demuxer| Some(Container { name, demuxer });
        match bytes {
            [_, _, _, _, b'f', b't', b'y', b'p', ..] => of("MP4", "mov"),
            [0x1a, 0x45, 0xdf, 0xa3, ..] => of("WebM", "matroska"),
            _ => None,
        }
    }
}

/// The programs that decode video.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VideoTools {
    /// `ffmpeg`, which decodes.
    pub ffmpeg: PathBuf,
    /// `ffprobe`, which counts frames.
    pub ffprobe: PathBuf,
}

impl Default for VideoTools {
    /// The programs `ffmpeg` and `ffprobe` that the `PATH` has.
    fn default() -> Self {
        VideoTools {
            ffmpeg: "ffmpeg".into(),
            ffprobe: "ffprobe".into(),
        }
    }
}

impl VideoTools {
    /// Whether the programs can be run.
    pub fn are_there(&self) -> bool {
        [&self.ffmpeg, &self.ffprobe].into_iter().all(can_run)
    }

    /// The frames of a video that `rule` wants.
    pub(crate) fn decode(
        &self,
        container: Container,
        bytes: &[u8],
        rule: impl ClipRule,
        limits: &Limits,
        deadline: Deadline,
    ) -> Result<Clip, MediaError> {
        let file = unlinked(bytes).map_err(|error| MediaError::Tool {
            tool: "a temporary file".into(),
            reason: error.to_string(),
        })?;
        let run = |program: &Path, arguments: &[String]| {
            let started = Running::start(program, arguments, &file, deadline);
            started.map_err(|error| match error.kind() {
                // Both come together.
                ErrorKind::NotFound => MediaError::NoTool {
                    format: container.name,
                    tool: match can_run(&self.ffmpeg) {
                        true => "ffprobe",
                        false => "ffmpeg",
                    },
                },
                _ => MediaError::Tool {
                    tool: program.display().to_string(),
                    reason: error.to_string(),
                },
            })
        };
        let (count, fps) = {
            let mut probing = run(&self.ffprobe, &probe_arguments(container))?;
            let mut said = String::new();
            let read = probing.out.by_ref().take(WORDS_MAX);
            let read = BufReader::new(read).read_to_string(&mut said);
            probing.end()?;
            read.map_err(|error| MediaError::broken(&error.to_string()))?;
            probed(&said)?
        };
        check_length(count, fps, limits)?;
        let numbers = rule.frames(count, fps);
        let mut kept = Kept::new(numbers, &rule, limits, deadline);
        let mut running = run(
            &self.ffmpeg,
            &decode_arguments(container, kept.numbers(), limits),
        )?;
        let taken = take_pictures(&mut running.out, &mut kept, limits);
        match (running.end(), taken) {
            // What the program says of a broken file comes before how its output is broken.
            (Err(error), Ok(()) | Err(MediaError::Broken(_))) if kept.next().is_some() => {
                return Err(error);
            }
            (_, taken) => taken?,
        }
        kept.clip(fps)
    }
}

/// Whether `program` can be run.
fn can_run(program: impl AsRef<Path>) -> bool {
    let mut asked = Command::new(program.as_ref());
    asked.arg("-version").stdin(Stdio::null());
    let asked = asked.stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}

/// A file of `bytes` that only this process and its children can reach, at its start.
fn unlinked(bytes: &[u8]) -> std::io::Result<File> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("paceline-{}-{count}.video", std::process::id()));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Has `ffprobe` count the packets of the first video, which hold a frame each.
fn probe_arguments(container: Container) -> Vec<String> {
    let words = [
        "-v",
        "error",
        "-protocol_whitelist",
        "file",
        "-f",
        container.demuxer,
        "-select_streams",
        "v:0",
        "-count_packets",
        "-show_entries",
        "stream=avg_frame_rate,nb_read_packets",
        "-of",
        "default=noprint_wrappers=1",
        INPUT,
    ];
    words.map(str::to_owned).to_vec()
}

/// Has `ffmpeg` write the frames of these `numbers`, one after the other.
fn decode_arguments(container: Container, numbers: &[usize], limits: &Limits) -> Vec<String> {
    let wanted: Vec<String> = numbers.iter().map(|n| format!("eq(n\\,{n})")).collect();
    // A second a frame, so that none is repeated or left out.
    let filter = format!("select={},settb=1,setpts=N", wanted.join("+"));
    let (count, pixels) = (numbers.len().to_string(), limits.pixels.to_string());
    let words = [
        "-nostdin",
        "-v",
        "error",
        "-protocol_whitelist",
        "file",
        "-max_alloc",
        ALLOCATION_MAX,
        "-threads",
        "2",
        "-max_pixels",
        &pixels,
        "-f",
        container.demuxer,
        "-i",
        INPUT,
        "-map",
        "0:v:0",
        "-vf",
        &filter,
        "-r",
        "1",
        "-frames:v",
        &count,
        "-c:v",
        "ppm",
        "-f",
        "image2pipe",
        "pipe:1",
    ];
    words.map(str::to_owned).to_vec()
}

/// How many frames there are, and how many a second, as `ffprobe` has `said`.
fn probed(said: &str) -> Result<(usize, Option<f64>), MediaError> {
    let of = |key: &str| {
        let mut lines = said.lines().filter_map(|line| line.split_once('='));
        lines.find_map(|(found, value)| (found == key).then_some(value.trim()))
    };
    let count = of("nb_read_packets").and_then(|n| n.parse().ok());
    let count = count.filter(|n| *n > 0);
    let count = count.ok_or_else(|| MediaError::Broken("it has no video".to_owned()))?;
    let fps = of("avg_frame_rate").and_then(|rate| {
        let (over, under) = rate.split_once('/')?;
        let fps = over.parse::<f64>().ok()? / under.parse::<f64>().ok()?;
        (fps.is_finite() && fps > 0.0).then_some(fps)
    });
    Ok((count, fps))
}

/// Reads pictures in PPM from `out` for as long as some are wanted.
fn take_pictures<R: ClipRule>(
    out: &mut impl BufRead,
    kept: &mut Kept<'_, R>,
    limits: &Limits,
) -> Result<(), MediaError> {
    while kept.next().is_some() {
        let Some([width, height]) = ppm_header(out)? else {
            return Ok(());
        };
        check_size(width, height, limits)?;
        let [width, height] = [width, height].map(|side| side as usize);
        let mut rgb = vec![0; height * width * 3];
        out.read_exact(&mut rgb)
            .map_err(|error| MediaError::broken(&error.to_string()))?;
        kept.take(&Frame::new(height, width, rgb))?;
    }
    Ok(())
}

/// Width and height of a picture in PPM; nothing at the end.
fn ppm_header(out: &mut impl BufRead) -> Result<Option<[u32; 2]>, MediaError> {
    let bad = || MediaError::Broken("the program for video wrote no picture".to_owned());
    let mut words = [const { String::new() }; 4];
    for (i, word) in words.iter_mut().enumerate() {
        loop {
            let mut byte = [0];
            let read = out.read(&mut byte);
            match read.map_err(|error| MediaError::broken(&error.to_string()))? {
                0 if i == 0 && word.is_empty() => return Ok(None),
                0 => return Err(bad()),
                _ if byte[0].is_ascii_whitespace() && word.is_empty() => {}
                _ if byte[0].is_ascii_whitespace() => break,
                _ if word.len() < 10 => word.push(char::from(byte[0])),
                _ => return Err(bad()),
            }
        }
    }
    let [magic, width, height, most] = words;
    match (width.parse(), height.parse()) {
        (Ok(width), Ok(height)) if magic == "P6" && most == "255" => Ok(Some([width, height])),
        _ => Err(bad()),
    }
}

/// A program at work, which is killed at the deadline or once nobody wants it any more.
struct Running {
    program: PathBuf,
    out: BufReader<std::process::ChildStdout>,
    child: Arc<Mutex<Child>>,
    /// Tells the thread that watches the deadline that the program has ended.
    ended: Option<Sender<()>>,
    watching: Option<thread::JoinHandle<()>>,
    /// What it says is wrong.
    errors: Receiver<String>,
    deadline: Deadline,
}

impl Running {
    fn start(
        program: &Path,
        arguments: &[String],
        file: &File,
        deadline: Deadline,
    ) -> std::io::Result<Running> {
        let mut input = file.try_clone()?;
        input.rewind()?;
        let mut command = Command::new(program);
        command.args(arguments).env_remove("FFREPORT");
        command.stdin(input);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take().expect("stdout is a pipe");
        let mut err = child.stderr.take().expect("stderr is a pipe");
        let (say, errors) = channel();
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = err.by_ref().take(WORDS_MAX).read_to_end(&mut text);
            let _ = say.send(String::from_utf8_lossy(&text).into_owned());
            let _ = std::io::copy(&mut err, &mut std::io::sink());
        });
        let child = Arc::new(Mutex::new(child));
        let (ended, told) = channel();
        let watched = child.clone();
        let watching = thread::spawn(move || {
            if told.recv_timeout(deadline.left()) == Err(RecvTimeoutError::Timeout) {
                kill(&watched);
            }
        });
        Ok(Running {
            program: program.to_owned(),
            out: BufReader::with_capacity(1 << 16, out),
            child,
            ended: Some(ended),
            watching: Some(watching),
            errors,
            deadline,
        })
    }

    /// Waits for the end of the program; it is killed if it still writes.
    ///
    /// # Errors
    ///
    /// What it says of the file if it has failed, and that time is up if it is.
    fn end(&mut self) -> Result<(), MediaError> {
        // A program that is ready ends by itself; one that writes on would never.
        let mut rest = [0];
        if self.out.read(&mut rest).is_ok_and(|n| n > 0) {
            kill(&self.child);
        }
        // Unlocked in between, so that it can be killed at the deadline.
        let status = loop {
            let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            let status = child.try_wait();
            drop(child);
            match status {
                Ok(None) => thread::sleep(POLL),
                status => break status,
            }
        };
        self.stop_watching();
        self.deadline.check()?;
        match status {
            Ok(Some(status)) if status.success() => Ok(()),
            _ => {
                let errors = self.errors.recv_timeout(WORDS_TIME).unwrap_or_default();
                let line = errors.lines().rev().find(|line| !line.trim().is_empty());
                let program = self.program.display();
                let line = line.unwrap_or("it failed and did not say why");
                Err(MediaError::broken(&format!("{program}: {line}")))
            }
        }
    }

    fn stop_watching(&mut self) {
        self.ended = None;
        if let Some(watching) = self.watching.take() {
            let _ = watching.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        kill(&self.child);
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = child.wait();
        drop(child);
        self.stop_watching();
    }
}

/// Kills a program; one that has ended stays so.
fn kill(child: &Mutex<Child>) {
    let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = child.kill();
}

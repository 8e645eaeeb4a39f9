//! Videos as clients send them.
//!
//! | part | a video is |
//! | --- | --- |
//! | `video_url`, `input_video` | a data URL in `video_url`, alone or as `url` in an object: a file, or `data:video/jpeg;base64,` and pictures that are set apart by commas |
//! | `video` | the same in `video`, or a list of data URLs, a picture for each frame |

use engine::{ClipOptions, ClipSource};
use serde_json::{Map, Value};

use super::file_of;
use crate::errors::{ApiError, excerpt};
use crate::limits::VIDEO_FRAMES_MAX;
use crate::sources::Data;

/// What a video's data should look like, for messages.
const FORM: &str = "`data:video/mp4;base64,...`";
/// What the data of a frame should look like, for messages.
const FRAME_FORM: &str = "`data:image/jpeg;base64,...`";

/// Fields of a part that are read.
const READ: &[&str] = &[
    "type",
    "video_url",
    "video",
    "fps",
    "sample_fps",
    "num_frames",
    "nframes",
    "max_frames",
];

/// A video as a request has it.
#[derive(Clone, PartialEq)]
pub(crate) struct Video {
    /// The place of the video in the request, for messages.
    pub(super) path: String,
    /// The file, or one for each frame.
    files: Vec<Data>,
    /// Whether each frame has a file.
    is_list: bool,
    /// Which frames are looked at.
    pub(super) options: ClipOptions,
}

impl std::fmt::Debug for Video {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Video({}, {} files)", self.path, self.files.len())
    }
}

impl Video {
    /// Takes its data out.
    pub(crate) fn take(&mut self) -> Video {
        Video {
            path: self.path.clone(),
            files: std::mem::take(&mut self.files),
            ..*self
        }
    }

    /// The file, or one for each frame.
    pub(super) fn files(&self) -> &[Data] {
        &self.files
    }

    /// The file, or one for each frame, to be replaced.
    pub(super) fn files_mut(&mut self) -> &mut [Data] {
        &mut self.files
    }

    /// Looks at the frames that `options` ask for where the video itself asks for nothing.
    pub(crate) fn with_defaults(&mut self, options: ClipOptions) {
        let own = self.options;
        // A number of frames in all leaves nothing to a rate.
        let has_frames = own.frames.is_some();
        self.options = ClipOptions {
            fps: own.fps.or(options.fps.filter(|_| !has_frames)),
            frames: own.frames.or(options.frames.filter(|_| own.fps.is_none())),
            frames_max: own.frames_max.or(options.frames_max),
        };
    }

    /// The bytes of its files.
    ///
    /// # Errors
    ///
    /// 400 for what is no base64.
    pub(super) fn source(self) -> Result<ClipSource, ApiError> {
        let Video { path, files, .. } = self;
        let mut files = files.into_iter().map(|data| file_of(&path, data));
        Ok(match self.is_list {
            true => ClipSource::Frames(files.collect::<Result<_, _>>()?),
            false => ClipSource::File(files.next().expect("a video has a file")?),
        })
    }
}

/// Whether a part of this type is a video, in OpenAI's requests.
pub(super) fn is_video(kind: &str) -> bool {
    matches!(kind, "video_url" | "input_video" | "video")
}

/// Checks the part at `path` of a message; the fields of it that are read.
pub(super) fn check(
    path: &str,
    part: &Map<String, Value>,
) -> Result<&'static [&'static str], ApiError> {
    find(path, part)?;
    Ok(READ)
}

/// The video in the part at `path` of a message.
pub(super) fn read(path: &str, part: &Map<String, Value>) -> Result<Video, ApiError> {
    let Found {
        path,
        files,
        is_list,
        options,
    } = find(path, part)?;
    Ok(Video {
        path,
        files: files.into_iter().map(Data::into_owned).collect(),
        is_list,
        options,
    })
}

/// A video where it stands in a request.
struct Found<'a> {
    path: String,
    files: Vec<Data<&'a str>>,
    is_list: bool,
    options: ClipOptions,
}

fn find<'a>(path: &str, part: &'a Map<String, Value>) -> Result<Found<'a>, ApiError> {
    let name = ["video_url", "video"]
        .into_iter()
        .find(|name| part.get(*name).is_some_and(|value| !value.is_null()));
    let Some(name) = name else {
        let missing = match part.get("type").and_then(Value::as_str) {
            Some("video") => "video",
            _ => "video_url",
        };
        return Err(ApiError::field(format!("{path}.{missing}"), "is missing"));
    };
    let at = format!("{path}.{name}");
    let mut options = read_options(path, part)?;
    let value = match &part[name] {
        Value::Object(inner) => {
            let inner_options = read_options(&at, inner)?;
            options = ClipOptions {
                fps: options.fps.or(inner_options.fps),
                frames: options.frames.or(inner_options.frames),
                frames_max: options.frames_max.or(inner_options.frames_max),
            };
            inner
                .get("url")
                .ok_or_else(|| ApiError::field(format!("{at}.url"), "is missing"))?
        }
        value => value,
    };
    let (files, is_list) = match value {
        Value::String(url) => {
            let (kind, data) = Data::of_url(&at, url, FORM)?;
            match data {
                Data::Base64(data) if kind.eq_ignore_ascii_case("video/jpeg") => {
                    (data.split(',').map(Data::Base64).collect(), true)
                }
                data => (vec![data], false),
            }
        }
        Value::Array(list) => (frames(&at, list)?, true),
        _ => {
            let message = format!("must be a string, {FORM}, or a list of frames, {FRAME_FORM}");
            return Err(ApiError::field(at, message));
        }
    };
    if files.len() > VIDEO_FRAMES_MAX {
        let message = format!("has {} frames, {VIDEO_FRAMES_MAX} at most", files.len());
        return Err(ApiError::field(at, message));
    }
    Ok(Found {
        path: at,
        files,
        is_list,
        options,
    })
}

/// The data of each frame of the `list` at `path`.
fn frames<'a>(path: &str, list: &'a [Value]) -> Result<Vec<Data<&'a str>>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::field(path, "has no frames"));
    }
    let frame = |(i, value): (usize, &'a Value)| {
        let path = format!("{path}[{i}]");
        match value {
            Value::String(url) => Ok(Data::of_url(&path, url, FRAME_FORM)?.1),
            _ => Err(ApiError::field(
                path,
                format!("must be a string, {FRAME_FORM}"),
            )),
        }
    };
    list.iter().enumerate().map(frame).collect()
}

/// Which frames of a video the fields of `map` at `path` ask for.
fn read_options(path: &str, map: &Map<String, Value>) -> Result<ClipOptions, ApiError> {
    let find = |names: &[&'static str]| {
        let mut found = names
            .iter()
            .filter_map(|name| Some((*name, map.get(*name)?)));
        found.find(|(_, value)| !value.is_null())
    };
    // Some clients write numbers as texts.
    let number = |value: &Value| match value {
        Value::String(text) => text.parse::<f64>().ok(),
        value => value.as_f64(),
    };
    let count = |names: &[&'static str]| match find(names) {
        None => Ok(None),
        Some((name, value)) => {
            let n = number(value).filter(|n| n.fract() == 0.0);
            match n.filter(|n| (1.0..=VIDEO_FRAMES_MAX as f64).contains(n)) {
                Some(n) => Ok(Some(n as usize)),
                None => {
                    let message = format!("must be a whole number from 1 to {VIDEO_FRAMES_MAX}");
                    Err(ApiError::field(format!("{path}.{name}"), message))
                }
            }
        }
    };
    let fps = match find(&["sample_fps", "fps"]) {
        None => None,
        Some((name, value)) => {
            let fps = number(value).filter(|fps| *fps > 0.0 && *fps <= 1000.0);
            let fps = fps.ok_or_else(|| {
                let message = "must be a number above 0, 1000 at most";
                ApiError::field(format!("{path}.{name}"), message)
            })?;
            Some(fps)
        }
    };
    let options = ClipOptions {
        fps,
        frames: count(&["num_frames", "nframes"])?,
        frames_max: count(&["max_frames"])?,
    };
    if options.fps.is_some() && options.frames.is_some() {
        let message = "cannot be given beside a number of frames in all";
        return Err(ApiError::field(format!("{path}.fps"), message));
    }
    Ok(options)
}

/// Which frames of videos the field `name` of a request asks for, an object of vLLM's; `kind` is the
/// name of the object in it that is about videos, if there is one for each kind of media.
///
/// # Errors
///
/// 400 for what is no such object, and for fields in it that would change the answer otherwise.
pub(crate) fn defaults(
    name: &str,
    value: Option<&Value>,
    kind: Option<&str>,
) -> Result<ClipOptions, ApiError> {
    let map = match value {
        None | Some(Value::Null) => return Ok(ClipOptions::default()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(ApiError::field(name, "must be an object")),
    };
    if let Some(kind) = kind {
        if let Some((other, _)) = map.iter().find(|(key, _)| *key != kind) {
            return Err(ApiError::unsupported(
                format!("{name}.{}", excerpt(other)),
                "",
            ));
        }
        return defaults(&format!("{name}.{kind}"), map.get(kind), None);
    }
    const KNOWN: [&str; 3] = ["fps", "num_frames", "max_frames"];
    let is_neutral = |key: &str, value: &Value| {
        value.is_null() || key == "do_sample_frames" && value == &Value::Bool(true)
    };
    let unknown = map
        .iter()
        .find(|(key, value)| !KNOWN.contains(&&***key) && !is_neutral(key, value));
    if let Some((key, _)) = unknown {
        return Err(ApiError::unsupported(
            format!("{name}.{}", excerpt(key)),
            "",
        ));
    }
    read_options(name, map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn part(part: Value) -> Result<Video, ApiError> {
        let Value::Object(part) = part else {
            unreachable!("an object")
        };
        read("messages[0].content[1]", &part)
    }

    #[test]
    fn a_video_comes_as_a_file_or_as_frames() {
        let file = "data:video/mp4;base64,TWFu";
        let frames = "data:video/jpeg;base64,TWFu,TWE=,TQ==";
        let listed = json!(["data:image/png;base64,TWFu", "data:image/png;base64,TQ=="]);
        for (form, name, files, is_list) in [
            (
                json!({"type": "video_url", "video_url": {"url": file}}),
                "video_url",
                1,
                false,
            ),
            (
                json!({"type": "input_video", "video_url": file}),
                "video_url",
                1,
                false,
            ),
            (json!({"type": "video", "video": file}), "video", 1, false),
            (
                json!({"type": "video_url", "video_url": {"url": frames}}),
                "video_url",
                3,
                true,
            ),
            (json!({"type": "video", "video": listed}), "video", 2, true),
        ] {
            let video = part(form.clone()).unwrap();
            assert_eq!(video.path, format!("messages[0].content[1].{name}"));
            assert_eq!(
                (video.files.len(), video.is_list),
                (files, is_list),
                "{form}"
            );
            assert!(video.source().is_ok());
        }
        let asked = json!({"type": "video", "video": file, "fps": "0.5", "max_frames": 9});
        let asked = part(asked).unwrap().options;
        let expected = ClipOptions {
            fps: Some(0.5),
            frames: None,
            frames_max: Some(9),
        };
        assert_eq!(asked, expected);
    }

    #[test]
    fn what_is_no_video_is_refused_by_its_place() {
        let file = "data:video/mp4;base64,TWFu";
        for (form, param, told) in [
            (json!({"type": "video"}), "video", "is missing"),
            (json!({"type": "video_url"}), "video_url", "is missing"),
            (
                json!({"type": "video_url", "video_url": {}}),
                "video_url.url",
                "is missing",
            ),
            (
                json!({"type": "video", "video": 7}),
                "video",
                "list of frames",
            ),
            (json!({"type": "video", "video": []}), "video", "no frames"),
            (
                json!({"type": "video", "video": [7]}),
                "video[0]",
                "must be a string",
            ),
            (
                json!({"type": "video", "video": file, "fps": 0}),
                "fps",
                "above 0",
            ),
            (
                json!({"type": "video", "video": file, "nframes": 1.5}),
                "nframes",
                "whole number",
            ),
            (
                json!({"type": "video", "video": file, "fps": 1, "num_frames": 2}),
                "fps",
                "cannot be given beside",
            ),
            (
                json!({"type": "video_url", "video_url": {"url": file, "max_frames": 0}}),
                "video_url.max_frames",
                "from 1",
            ),
        ] {
            let error = part(form.clone()).unwrap_err();
            assert!(error.message.contains(told), "{form}: {}", error.message);
            let param = format!("messages[0].content[1].{param}");
            assert_eq!(error.param.as_deref(), Some(&*param), "{form}");
        }
        let many = vec![json!("data:image/png;base64,TQ=="); VIDEO_FRAMES_MAX + 1];
        let error = part(json!({"type": "video", "video": many})).unwrap_err();
        assert!(error.message.contains("at most"), "{}", error.message);
    }

    #[test]
    fn a_request_may_say_which_frames_its_videos_have() {
        let asked = |value: Value| defaults("mm_processor_kwargs", Some(&value), None);
        let options = asked(json!({"fps": 2, "do_sample_frames": true, "size": null})).unwrap();
        assert_eq!(options.fps, Some(2.0));
        let mut video = part(json!({"type": "video", "video": "data:;base64,TQ==", "nframes": 3}));
        let video = video.as_mut().unwrap();
        video.with_defaults(options);
        assert_eq!((video.options.fps, video.options.frames), (None, Some(3)));
        let error = asked(json!({"max_pixels": 1})).unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some("mm_processor_kwargs.max_pixels")
        );
        assert!(asked(json!({"do_sample_frames": false})).is_err());
        let io = json!({"video": {"num_frames": 8}});
        let options = defaults("media_io_kwargs", Some(&io), Some("video")).unwrap();
        assert_eq!(options.frames, Some(8));
        let io = json!({"audio": {}});
        assert!(defaults("media_io_kwargs", Some(&io), Some("video")).is_err());
    }
}

//! Every limit of the server, by name.
//!
//! What an operator may want to change is a field of [`Limits`]; what only
//! keeps a request from being absurd is a constant.

use std::time::Duration;

/// Bytes of a request's line and headers.
pub const HEADER_BYTES_MAX: usize = 16 << 10;
/// Bytes of the body of a chat request, which may carry images.
pub const CHAT_BODY_BYTES_MAX: usize = 32 << 20;
/// Bytes of the body of any other request: [`JSON_WEIGHT_MAX`] token ids and their commas,
/// or a text of as many bytes.
pub const BODY_BYTES_MAX: usize = 16 << 20;
/// Bytes of all bodies that are being received or wait to be read at one time.
pub const BODIES_BYTES_MAX: usize = 512 << 20;
/// Connections at one time; for one more, the one is closed that has waited longest for a
/// request.
pub const CONNECTIONS_MAX: usize = 4096;
/// Text of a stream that its client has not read yet.
pub const STREAM_BUFFER_BYTES_MAX: usize = 256 << 10;
/// Bytes of a message on a WebSocket, which waits in memory until all of it is there.
pub const SOCKET_MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Messages of a WebSocket that wait while a response is being written.
pub const SOCKET_WAITING_MAX: usize = 4;
/// Bytes of memory that the conversation takes which a WebSocket keeps for its next response.
pub const SOCKET_CONVERSATION_BYTES_MAX: usize = 16 << 20;
/// How long a WebSocket may be open.
pub const SOCKET_LIFE: Duration = Duration::from_secs(60 * 60);
/// Responses of the Responses API that are kept at one time.
pub const STORED_RESPONSES_MAX: usize = 1024;
/// Bytes of all of these.
pub const STORED_BYTES_MAX: usize = 64 << 20;
/// Bytes of a request that is read, rendered and tokenized beside other small ones: some
/// milliseconds of a core.
pub const SHORT_BODY_BYTES: usize = 8 << 10;
/// Bytes of a request above which such work waits in a lane of its own: tokenizing takes about
/// half a second a megabyte.
pub const LONG_BODY_BYTES: usize = 256 << 10;
/// Requests up to [`SHORT_BODY_BYTES`] that are worked on at one time.
pub const TEXT_WORKERS_MAX: usize = 4;
/// Requests between [`SHORT_BODY_BYTES`] and [`LONG_BODY_BYTES`] that are worked on at one time.
pub const MIDDLE_WORKERS: usize = 2;
/// Requests above [`LONG_BODY_BYTES`] that are worked on at one time.
pub const LONG_WORKERS: usize = 1;

/// Nesting of a request's JSON.
pub const JSON_DEPTH_MAX: usize = 64;
/// Weight of a request's JSON, in values of 72 bytes. A value takes that for as little as 2 bytes
/// of text and an object seven times as much, so the body's size alone does not bound it.
pub const JSON_WEIGHT_MAX: usize = 1 << 20;
/// Weight of a conversation: some 20,000 messages, or half as many made of parts. A chat template
/// takes three times as much of memory as its messages.
pub const MESSAGES_WEIGHT_MAX: usize = 1 << 18;
/// Weight of a list of tools.
pub const TOOLS_WEIGHT_MAX: usize = 1 << 17;
/// Pictures of a request.
pub const PICTURES_MAX: usize = 32;
/// Videos of a request.
pub const VIDEOS_MAX: usize = 8;
/// Sounds of a request.
pub const SOUNDS_MAX: usize = 16;
/// Bytes of the file of a picture, of a video or of a sound.
pub const MEDIA_BYTES_MAX: usize = 24 << 20;
/// Pixels of a picture, of a frame, and of all frames of a video that are looked at: decoded they take
/// 3 bytes each.
pub const MEDIA_PIXELS_MAX: u64 = 64_000_000;
/// Frames of a video that come as pictures, or that a request asks for.
pub const VIDEO_FRAMES_MAX: usize = 768;
/// Seconds that a video takes.
pub const VIDEO_SECONDS_MAX: u64 = 3600;
/// Time for decoding a video.
pub const VIDEO_TIME: Duration = Duration::from_secs(60);
/// Bytes of all files of a request that are not in it: what it names at addresses and in a folder.
pub const NAMED_BYTES_MAX: usize = 32 << 20;
/// Time in which all of them must have arrived.
pub const NAMED_TIME_MAX: Duration = Duration::from_secs(20);
/// Requests whose files are read and held at one time.
pub const NAMED_REQUESTS_MAX: usize = 16;
/// Requests that wait for that; more are refused.
pub const NAMED_WAITING_MAX: usize = 64;
/// Prompts of a request.
pub const PROMPTS_MAX: usize = 128;
/// Tools of a request.
pub const TOOLS_MAX: usize = 128;
/// Bytes of a request's tools as JSON, as far as the model is told of them.
pub const TOOLS_BYTES_MAX: usize = 512 << 10;
/// Weight of what is not a prompt or a list of tools.
pub const OTHER_WEIGHT_MAX: usize = 10_000;
/// Entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Entries of `stop_token_ids`.
pub const STOP_TOKENS_MAX: usize = 1024;
/// Entries of `dry_sequence_breakers`.
pub const DRY_BREAKERS_MAX: usize = 32;
/// Characters of an entry of `dry_sequence_breakers`.
pub const DRY_BREAKER_CHARS_MAX: usize = 40;
/// Characters of an echoed `X-Request-Id`.
pub const REQUEST_ID_CHARS_MAX: usize = 128;
/// Names listed in the `x-ignored-fields` response header.
pub const IGNORED_FIELDS_MAX: usize = 16;
/// Names of models that an error message lists.
pub const LISTED_MODELS_MAX: usize = 20;
/// Characters of user data that an error message repeats.
pub const ECHO_CHARS_MAX: usize = 64;

/// Times, sizes and counts that an operator may change.
#[derive(Clone, Debug)]
pub struct Limits {
    /// From the first byte of a request, or from the connection, to the end of
    /// the headers.
    pub header_timeout: Duration,
    /// Time between two requests on one connection.
    pub idle_timeout: Duration,
    /// Time from the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// Time in which a client that has something to read takes no byte.
    pub write_timeout: Duration,
    /// Time from submission to the last token.
    pub request_timeout: Duration,
    /// How long a refused client is owed a place after it was to come back.
    pub turn_grace: Duration,
    /// Time between two signs of life in a stream.
    pub keep_alive: Duration,
    /// What running requests get to finish after a shutdown has begun.
    pub drain_timeout: Duration,
    /// What cancelled streams get to send their last event.
    pub cancel_grace: Duration,
    /// Bytes of the body of a chat request.
    pub chat_body_bytes: usize,
    /// Bytes of the body of any other request.
    pub body_bytes: usize,
    /// Bytes of all bodies that are being received or wait to be read at one time.
    pub bodies_bytes: usize,
    /// Connections at one time.
    pub connections: usize,
    /// Text of a stream that its client has not read yet.
    pub stream_buffer_bytes: usize,
    /// Responses of the Responses API that are kept at one time; the one that was used longest
    /// ago makes room for a new one.
    pub stored_responses: usize,
    /// Bytes of memory that kept responses and their inputs take together.
    pub stored_bytes: usize,
    /// Requests up to [`SHORT_BODY_BYTES`] that are rendered and tokenized at one time.
    pub text_workers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(60 * 60),
            turn_grace: Duration::from_secs(2),
            keep_alive: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            cancel_grace: Duration::from_secs(1),
            chat_body_bytes: CHAT_BODY_BYTES_MAX,
            body_bytes: BODY_BYTES_MAX,
            bodies_bytes: BODIES_BYTES_MAX,
            connections: CONNECTIONS_MAX,
            stream_buffer_bytes: STREAM_BUFFER_BYTES_MAX,
            stored_responses: STORED_RESPONSES_MAX,
            stored_bytes: STORED_BYTES_MAX,
            text_workers: TEXT_WORKERS_MAX,
        }
    }
}

//! Containers of sound, told apart by their first bytes, and what is in them.

use std::io::ErrorKind;

use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::CODEC_ID_VORBIS;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::core::packet::Packet;
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

use super::Sound;
use super::read_budget::ReadBudget;
use super::vorbis::check_codebooks;
use crate::deadline::{Deadline, Timed};
use crate::error::check;
use crate::{Bound, MediaError, SoundLimits};

/// Bytes of what a codec is set up with, at most: those of Vorbis have some thousand.
const SETUP_BYTES_MAX: usize = 64 << 10;

/// A WAV file with this many bytes of sound or more states none: what writes to a pipe does not know
/// how many there will be.
const UNKNOWN_BYTES: u64 = 0x7f00_0000;

/// The largest sample that is taken; sound is about -1 to 1.
const LOUDEST: f32 = 1e4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Wav,
    Flac,
    Mp3,
    Ogg,
}

/// A container, and where in the file it begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Container {
    kind: Kind,
    first: usize,
}

impl Container {
    /// The container that `bytes` are, if it is known.
    pub(super) fn of(bytes: &[u8]) -> Option<Container> {
        let first = after_tags(bytes);
        let head = bytes.get(first..)?;
        let kind = match head {
            [
                b'R',
                b'I',
                b'F',
                b'F',
                _,
                _,
                _,
                _,
                b'W',
                b'A',
                b'V',
                b'E',
                ..,
            ] => Kind::Wav,
            [b'f', b'L', b'a', b'C', ..] => Kind::Flac,
            [b'O', b'g', b'g', b'S', ..] => Kind::Ogg,
            // A frame of layer 3.
            [0xff, second, ..] if second & 0xe6 == 0xe2 => Kind::Mp3,
            // Tags stand before nothing else.
            [_, ..] if first > 0 => Kind::Mp3,
            _ => return None,
        };
        Some(Container { kind, first })
    }

    /// Decodes it to one channel at its own rate.
    pub(super) fn decode(
        self,
        bytes: &[u8],
        limits: &SoundLimits,
        deadline: Deadline,
    ) -> Result<Sound, MediaError> {
        let budget = ReadBudget::default();
        let file = Timed::new(bytes.get(self.first..).unwrap_or_default(), deadline);
        let options = MediaSourceStreamOptions::default();
        let stream = MediaSourceStream::new(Box::new(budget.limit(file)), options);
        let opened = self.reader(stream);
        budget.check()?;
        let mut reader = opened.map_err(refused)?;
        let track = reader.default_track(TrackType::Audio);
        let track = track.ok_or(MediaError::UnknownSound)?.clone();
        let Some(CodecParameters::Audio(codec)) = &track.codec_params else {
            return Err(MediaError::UnknownSound);
        };
        check_codec(codec, limits)?;
        let stated = self.stated(&track, codec);
        if let (Some(frames), Some(rate)) = (stated, codec.sample_rate) {
            check_seconds(frames, rate, limits)?;
        }
        let mut packets = Packets {
            reader: &mut *reader,
            track: track.id,
            budget,
            deadline,
        };
        let sound = decode_track(&mut packets, codec, limits)?;
        match stated {
            Some(frames) if frames > sound.samples.len() as u64 => Err(MediaError::Broken(
                format!("{} of {frames} samples are there", sound.samples.len()),
            )),
            _ => Ok(sound),
        }
    }

    fn reader<'s>(
        self,
        stream: MediaSourceStream<'s>,
    ) -> Result<Box<dyn FormatReader + 's>, Error> {
        let options = FormatOptions::default();
        Ok(match self.kind {
            Kind::Wav => Box::new(WavReader::try_new(stream, options)?),
            Kind::Flac => Box::new(FlacReader::try_new(stream, options)?),
            Kind::Mp3 => Box::new(MpaReader::try_new(stream, options)?),
            Kind::Ogg => Box::new(OggReader::try_new(stream, options)?),
        })
    }

    /// Samples of a channel that the header states: those of other containers are estimates.
    fn stated(self, track: &Track, codec: &AudioCodecParameters) -> Option<u64> {
        let frames = track.num_frames.filter(|n| *n > 0)?;
        let bits = u64::from(codec.bits_per_coded_sample.or(codec.bits_per_sample)?);
        let channels = codec.channels.as_ref()?.count() as u64;
        let bytes = frames.saturating_mul(bits * channels) / 8;
        match self.kind {
            Kind::Wav => (bytes < UNKNOWN_BYTES).then_some(frames),
            Kind::Flac => Some(frames),
            Kind::Mp3 | Kind::Ogg => None,
        }
    }
}

/// Bytes of the ID3v2 tags that `bytes` begin with.
fn after_tags(bytes: &[u8]) -> usize {
    let mut first = 0;
    while let Some([b'I', b'D', b'3', _, _, flags, size @ ..]) = bytes.get(first..first + 10) {
        let size = size
            .iter()
            .fold(0, |n, byte| n << 7 | usize::from(byte & 0x7f));
        let footer = if flags & 0x10 > 0 { 10 } else { 0 };
        first += 10 + size + footer;
    }
    first
}

fn check_seconds(frames: u64, rate: u32, limits: &SoundLimits) -> Result<(), MediaError> {
    let seconds = frames.div_ceil(u64::from(rate.max(1)));
    check(Bound::Seconds, u64::from(limits.seconds), seconds)
}

/// Channels and samples a second, checked.
fn check_spec(channels: usize, rate: u32, limits: &SoundLimits) -> Result<(), MediaError> {
    check(Bound::Channels, limits.channels as u64, channels as u64)?;
    check(
        Bound::SampleRate,
        u64::from(*limits.rates.end()),
        u64::from(rate),
    )?;
    match channels > 0 && rate >= *limits.rates.start() {
        true => Ok(()),
        false => Err(MediaError::Broken(format!(
            "it has {channels} channels of {rate} samples a second"
        ))),
    }
}

/// Checks what a header states of the codec, before its decoder is made.
fn check_codec(codec: &AudioCodecParameters, limits: &SoundLimits) -> Result<(), MediaError> {
    let setup = codec.extra_data.as_deref().unwrap_or_default();
    if setup.len() > SETUP_BYTES_MAX {
        let message = format!("its codec is set up with {} bytes", setup.len());
        return Err(MediaError::Broken(message));
    }
    if codec.codec == CODEC_ID_VORBIS {
        check_codebooks(setup)?;
    }
    match (&codec.channels, codec.sample_rate) {
        (Some(channels), Some(rate)) => check_spec(channels.count(), rate, limits),
        _ => Ok(()),
    }
}

/// The packets of one track.
struct Packets<'a, 'b> {
    reader: &'a mut (dyn FormatReader + 'b),
    track: u32,
    budget: ReadBudget,
    deadline: Deadline,
}

impl Packets<'_, '_> {
    /// The next packet; none at the end of the file, wherever it is.
    fn next(&mut self) -> Result<Option<Packet>, MediaError> {
        loop {
            self.deadline.check()?;
            let next = self.reader.next_packet();
            self.budget.check()?;
            self.budget.renew();
            // Tags that come on the way would be kept.
            self.reader.metadata().skip_to_latest();
            match next {
                Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Ok(None);
                }
                Ok(Some(packet)) if packet.track_id != self.track => {}
                other => return other.map_err(broken),
            }
        }
    }
}

/// The samples of the track of `packets`, its channels as one.
fn decode_track(
    packets: &mut Packets<'_, '_>,
    codec: &AudioCodecParameters,
    limits: &SoundLimits,
) -> Result<Sound, MediaError> {
    let codecs = symphonia::default::get_codecs();
    let options = AudioDecoderOptions::default();
    let decoder = codecs.make_audio_decoder(codec, &options);
    let mut decoder = decoder.map_err(refused)?;
    let (mut spec, mut samples, mut packet_samples) = (None, Vec::new(), Vec::<f32>::new());
    while let Some(packet) = packets.next()? {
        let decoded = decoder.decode(&packet).map_err(broken)?;
        let own = (decoded.spec().channels().count(), decoded.spec().rate());
        let (channels, rate) = *spec.get_or_insert(own);
        if own != (channels, rate) {
            let message = "its channels or samples a second change on the way";
            return Err(MediaError::Broken(message.to_owned()));
        }
        check_spec(channels, rate, limits)?;
        decoded.copy_to_vec_interleaved(&mut packet_samples);
        samples.extend(packet_samples.chunks_exact(channels).map(mean));
        check_seconds(samples.len() as u64, rate, limits)?;
    }
    let Some((_, rate)) = spec.filter(|_| !samples.is_empty()) else {
        return Err(MediaError::Broken("it has no samples".to_owned()));
    };
    match samples.iter().all(|sample| sample.abs() <= LOUDEST) {
        true => Ok(Sound { rate, samples }),
        false => Err(MediaError::Broken("a sample is out of range".to_owned())),
    }
}

/// One channel of all.
fn mean(channels: &[f32]) -> f32 {
    match channels {
        [one] => *one,
        _ => channels.iter().sum::<f32>() / channels.len() as f32,
    }
}

/// Why a file was not opened.
fn refused(error: Error) -> MediaError {
    match error {
        Error::Unsupported(_) => MediaError::UnknownSound,
        _ => broken(error),
    }
}

/// A decoder's error, in at most a line.
fn broken(error: Error) -> MediaError {
    MediaError::broken(&error.to_string())
}

"""Sound files and what the public processors read in them: `crates/media/tests/sound`.

Each file has the same two tones, one that rises and one that stays, at another rate. `samples.tsv` has of every file its
name, the number of samples at 16 kHz, and every 16th of them, as `transformers.audio_utils.load_audio` returns them.
`PYTHONPATH= python3 tests/golden/sounds.py` needs transformers, soundfile and soxr; files of MP3 and Vorbis differ with
the encoder's version, so they are made once and kept.
"""

from pathlib import Path

import numpy as np
import soundfile
from transformers.audio_utils import load_audio

OUT = Path(__file__).parents[2] / "crates/media/tests/sound"

#: Name, samples a second, channels, and how soundfile is to write it.
FILES = [
    ("stereo.flac", 44_100, 2, dict(format="FLAC", subtype="PCM_16")),
    ("mono.flac", 16_000, 1, dict(format="FLAC", subtype="PCM_24")),
    ("mono.mp3", 24_000, 1, dict(format="MP3")),
    ("stereo.mp3", 48_000, 2, dict(format="MP3")),
    ("mono.ogg", 16_000, 1, dict(format="OGG", subtype="VORBIS")),
    ("stereo.ogg", 22_050, 2, dict(format="OGG", subtype="VORBIS")),
]


def tones(rate, channels):
    """A quarter of a second."""
    t = np.arange(rate // 4) / rate
    rising = 0.4 * np.sin(2 * np.pi * (200 * t + 6000 * t**2))
    steady = 0.3 * np.sin(2 * np.pi * 700 * t)
    return np.stack([rising + steady, rising - 0.5 * steady][:channels], -1)


def main():
    OUT.mkdir(exist_ok=True)
    lines = []
    for name, rate, channels, how in FILES:
        path = OUT / name
        if not path.exists():
            soundfile.write(path, tones(rate, channels), rate, **how)
        read = load_audio(str(path), 16_000, backend="soundfile")
        values = " ".join(f"{value:.7f}" for value in read[::16])
        lines.append(f"{name}\t{len(read)}\t{values}\n")
    (OUT / "samples.tsv").write_text("".join(lines))


if __name__ == "__main__":
    main()

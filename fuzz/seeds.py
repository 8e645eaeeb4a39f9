"""Writes small valid pictures and sounds, of which the targets `media` and `sound` begin:

    python fuzz/seeds.py fuzz/corpus

It needs Pillow, and ffmpeg for sounds. Every file has less than 3 kilobytes.
"""

import subprocess
import sys
from pathlib import Path

from PIL import Image


def pictures(folder):
    image = Image.new("RGB", (16, 12))
    image.putdata([(x * 13 % 256, y * 31 % 256, x * y) for y in range(12) for x in range(16)])
    frames = [Image.new("RGB", (12, 10), (i * 60, 20, 200 - i * 30)) for i in range(4)]
    moving = {"save_all": True, "append_images": frames[1:], "duration": 80}
    for name, picture, options in [
        ("rgb.png", image, {}),
        ("rgba.png", image.convert("RGBA"), {}),
        ("palette.png", image.convert("P"), {}),
        ("bits.png", image.convert("1"), {}),
        ("gray-alpha.png", image.convert("LA"), {}),
        ("gray16.png", Image.new("I;16", (9, 7), 300), {}),
        ("baseline.jpg", image, {"quality": 40}),
        ("progressive.jpg", image, {"quality": 40, "progressive": True}),
        ("halved.jpg", image.resize((40, 40)), {"quality": 50, "subsampling": 2}),
        ("restarts.jpg", image, {"quality": 40, "restart_marker_blocks": 1}),
        ("cmyk.jpg", image.convert("CMYK"), {"quality": 40}),
        ("gray.jpg", image.convert("L"), {"quality": 40}),
        ("lossless.webp", image, {"lossless": True}),
        ("lossy.webp", image, {"quality": 30}),
        ("alpha.webp", Image.new("RGBA", (20, 20), (255, 0, 0, 90)), {"quality": 50}),
        ("moving.webp", frames[0], moving),
        ("moving-lossless.webp", frames[0], moving | {"lossless": True}),
        ("still.gif", image, {}),
        ("interlaced.gif", image.convert("P"), {"interlace": 1}),
        ("moving.gif", frames[0], moving),
    ]:
        picture.save(folder / name, **options)


def without_padding(flac):
    """A FLAC file without its blocks of padding, of which ffmpeg writes 8 kilobytes."""
    at, blocks = 4, []
    while True:
        kind, length = flac[at], int.from_bytes(flac[at + 1 : at + 4], "big")
        blocks.append((kind & 127, flac[at : at + 4 + length]))
        at += 4 + length
        if kind & 128:
            break
    kept = [block for kind, block in blocks if kind != 1]
    kept[-1] = bytes([kept[-1][0] | 128]) + kept[-1][1:]
    return flac[:4] + b"".join(kept) + flac[at:]


def sounds(folder):
    for name, rate, seconds, options in [
        ("bytes.wav", 8000, 0.05, ["-c:a", "pcm_u8"]),
        ("words.wav", 16000, 0.03, ["-c:a", "pcm_s16le"]),
        ("stereo24.wav", 16000, 0.01, ["-c:a", "pcm_s24le", "-ac", "2"]),
        ("floats.wav", 44100, 0.01, ["-c:a", "pcm_f32le"]),
        ("mono.flac", 8000, 0.05, []),
        ("stereo.flac", 16000, 0.2, ["-ac", "2"]),
        ("mono.mp3", 16000, 0.1, ["-b:a", "8k", "-write_xing", "0", "-id3v2_version", "0"]),
        ("stereo.mp3", 24000, 0.1, ["-b:a", "16k", "-ac", "2"]),
        ("vorbis.ogg", 8000, 0.05, ["-c:a", "libvorbis", "-b:a", "16k"]),
        ("flac.ogg", 8000, 0.05, ["-c:a", "flac"]),
    ]:
        tone = f"sine=frequency=440:sample_rate={rate}:duration={seconds}"
        made = ["ffmpeg", "-nostdin", "-v", "error", "-y", "-f", "lavfi", "-i", tone]
        subprocess.run([*made, *options, "-fflags", "+bitexact", folder / name], check=True)
        if name.endswith(".flac"):
            (folder / name).write_bytes(without_padding((folder / name).read_bytes()))


if __name__ == "__main__":
    for target, write in [("media", pictures), ("sound", sounds)]:
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)

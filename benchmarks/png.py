"""Writes PNG files, for benchmarks that show pictures to a server."""

import base64
import struct
import zlib


def address(width, height, rows):
    """A `data:` address that holds a PNG. `rows` are its rows from the top, 3 bytes a pixel: red, green, blue."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    # Each row begins with its filter: none.
    data = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 1)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()

"""Files that claim to be images and are not, or are images that cost too much; each is small and quick to make."""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable

from PIL import Image


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 1, rows: int = 1) -> bytes:
    """A grey PNG of the claimed size with so many rows of zeros."""
    packer = zlib.compressobj(1)
    line = bytes(1 + (min(width, 10**6) * depth + 7) // 8)
    pixels = b"".join(packer.compress(line) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), *chunks, _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _saved(kind: str, size: tuple[int, int] = (16, 16), *, mode: str = "RGB", **settings: object) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, 7 if mode != "RGB" else (9, 8, 7)).save(buffer, kind, **settings)
    return buffer.getvalue()


def _webp() -> bytes:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:])
    data = bytearray(buffer.getvalue())
    place = data.index(b"VP8X") + 12
    data[place : place + 6] = struct.pack("<I", 16382)[:3] * 2
    return bytes(data)


def _jpeg() -> bytes:
    data = bytearray(_saved("JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def _tiff(width: int, height: int, *, following: int = 0) -> bytes:
    """A grey TIFF with one strip of eight bytes."""
    entries = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 200),
        (278, 4, height),
    ]
    entries += [(279, 4, 8)]
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    head = b"II*\x00" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + table + struct.pack("<I", following)
    return head.ljust(200, b"\0") + b"\x01\x02\x03\x04\x05\x06\x07\x08"


def _gif() -> bytes:
    frames = [Image.new("P", (200, 200), place % 256) for place in range(2000)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.png", _saved("PNG"))
    return buffer.getvalue()


_ZEROS = zlib.compress(bytes(100_000_000), 1)
IMAGES: dict[str, Callable[[], bytes]] = {
    "png of 50000 x 50000": lambda: png(50_000, 50_000, rows=50_000),
    "png of 2147483647 x 1": lambda: png(2**31 - 1, 1),
    "png of 8001 x 8000": lambda: png(8001, 8000),
    "gif of 65535 x 65535": lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + _saved("GIF")[13:],
    "webp of 16383 x 16383": _webp,
    "bmp of 60000 x 60000": lambda: _saved("BMP")[:18] + struct.pack("<ii", 60_000, 60_000) + _saved("BMP")[26:],
    "tiff of 60000 x 60000": lambda: _tiff(60_000, 60_000),
    "jpeg of 65500 x 65500": _jpeg,
    "ppm of 99999 x 99999": lambda: b"P6 99999 99999 255\n" + bytes(100),
    "png with a text of 100 MB": lambda: png(16, 16, _chunk(b"zTXt", b"a\0\0" + _ZEROS), rows=16),
    "png with a profile of 100 MB": lambda: png(16, 16, _chunk(b"iCCP", b"a\0\0" + _ZEROS), rows=16),
    "png without pixels": lambda: png(64, 64, rows=0),
    "png cut in half": lambda: _saved("PNG", (64, 64))[:80],
    "png with a wrong checksum": lambda: png(16, 16, rows=16).replace(
        b"\0\0\0\x10\0\0\0\x10\x01", b"\0\0\0\x10\0\0\0\x11\x01"
    ),
    "jpeg cut in half": lambda: _saved("JPEG", (640, 640))[:700],
    "gif of 2000 frames": _gif,
    "tiff of floats": lambda: _saved("TIFF", mode="F"),
    "tiff with a loop of pages": lambda: _tiff(2, 4, following=8),
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "pdf": lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "html": lambda: b"<!DOCTYPE html><html></html>",
    "icns": lambda: b"icns" + struct.pack(">I", 99) + b"ic10" + bytes(91),
    "fits": lambda: b"SIMPLE  =                    T".ljust(80) + bytes(2800),
    "psd": lambda: b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(30),
    "zip": _zip,
    "python pickle": lambda: pickle.dumps({"a": 1}),
    "nothing": lambda: b"",
    "zeros": lambda: bytes(100_000),
}
"""By the names in the table of attacks."""

"""What tells two sets of weights apart that have the same name: a model or an adapter in a local folder.

A folder's name says nothing of what is in it. Reading all of the weights would take minutes, so small files (configuration) are taken
whole, and of large ones their size, the beginning and pieces spread evenly over the rest. Training changes every piece.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

PIECE_BYTES = 4096
PIECES = 64
WHOLE_BYTES = 1 << 20
KINDS = {".json", ".safetensors", ".bin", ".pt", ".gguf"}


def model_name(model: str) -> str:
    """As it is on a hub; of a local folder the last part alone, since it may be mounted anywhere and `fingerprint` knows what is in it."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def fingerprint(folder: str) -> str:
    """Of a local model or adapter, as hexadecimal text; "" for one that is not a folder here (its name and revision say what it is)."""
    path = Path(folder)
    if not path.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.suffix in KINDS and file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as octets:
            if size <= WHOLE_BYTES:
                digest.update(octets.read())
                continue
            for number in range(PIECES):
                octets.seek((size - PIECE_BYTES) * number // (PIECES - 1))
                digest.update(octets.read(PIECE_BYTES))
    return digest.hexdigest()

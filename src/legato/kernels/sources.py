"""Which sources a library was compiled from. Stands alone: the package's build uses it before there is a package."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "native"


def sources_digest() -> str:
    """Of everything in `native/`, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.[ch]")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]

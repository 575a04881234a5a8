"""Small file operations that never leave a half-written result under its final name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text_atomically(path: Path, text: str) -> None:
    """Write, fsync, rename: a reader sees the old text or the new one, never a part."""
    staged = path.with_name(path.name + ".part")
    with staged.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    staged.replace(path)
    sync_folder(path.parent)


def write_json_atomically(path: Path, value: Any) -> None:
    """`write_text_atomically` of indented JSON."""
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def folder_made_atomically(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that becomes `path` when the body ends without an error.

    A folder left by an earlier killed attempt is removed first. `path` must not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(path.name + ".part")
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    yield staged
    for file in staged.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    staged.rename(path)
    sync_folder(path.parent)

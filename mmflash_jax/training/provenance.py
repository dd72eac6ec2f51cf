"""What a target's answers and scores depend on besides the run's own settings, as short hashes.

A file of answers or scores names them, so that another checkpoint under the same name, another chat
template or another image size is noticed.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmflash_jax.registry import pair

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def target_identity(name: str, dtype: str) -> dict[str, Any]:
    """Name, revision, dtype and front end of the target that a config names."""
    folder, _ = pair(name, "none")
    return {
        "target": name,
        "target_revision": _revision(folder),
        "dtype": dtype,
        "chat_template": _chat_template(folder),
        "image_processor": _hash_files(folder, "preprocessor_config.json", "processor_config.json"),
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_hash(paths: Sequence[Path]) -> str:
    """Of one file, or of the names and contents of several."""
    if len(paths) == 1:
        return file_hash(paths[0])
    return _hash([(path.name, file_hash(path)) for path in paths])


def _revision(folder: Path) -> str:
    """Hash of the config and of each weight file's header, size and a few pieces of its data.

    Weights are gigabytes, and a retrained checkpoint keeps header and size: the pieces tell it
    from the old one without reading everything.
    """
    made = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        made.update(f"{path.name} {size} ".encode())
        with path.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            made.update(stream.read(header))
            for index in range(_SAMPLES):
                stream.seek(8 + header + (size - 8 - header) * index // _SAMPLES)
                made.update(stream.read(_SAMPLE_BYTES))
    return made.hexdigest()


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return file_hash(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    template = json.loads(path.read_text()).get("chat_template") if path.exists() else None
    return None if template is None else _hash(template)


def _hash_files(folder: Path, *names: str) -> str:
    """Of the settings in those files that are there; their order and spaces do not matter."""
    found = {name: json.loads((folder / name).read_text())
             for name in names if (folder / name).exists()}  # fmt: skip
    return _hash(found)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Lazy reader and plain writer of Hugging Face safetensors folders.

Files are mapped, not read: a tensor costs memory only while one of its slices is copied to a
device. The header layout is that of the safetensors format description.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class TensorStore(Mapping[str, np.ndarray]):
    """Tensor name -> memory-mapped array, over one file or a sharded index.

    `duplicates` names the tensors that more than one file holds; the first file counts.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.duplicates: list[str] = []
        self._entries: dict[str, tuple[Path, str, tuple[int, ...], int, int]] = {}
        self._maps: dict[Path, np.memmap] = {}
        for file in self._files():
            self._add(file)

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [self.folder / name for name in names]
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise FileNotFoundError(f"{index} names files that are not there: {missing}")
            return files
        single = self.folder / "model.safetensors"
        if not single.exists():
            raise FileNotFoundError(
                f"{self.folder} holds neither model.safetensors nor model.safetensors.index.json"
            )
        return [single]

    def _add(self, file: Path) -> None:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (header_bytes,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (size,)
            if 8 + header_bytes > size:
                raise ValueError(f"{file} is truncated or no safetensors file ({size} bytes)")
            header = json.loads(stream.read(header_bytes))
        base = 8 + header_bytes
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if base + end > size:
                raise ValueError(f"{file} is truncated: {name} ends at byte {base + end} of {size}")
            if name in self._entries:
                self.duplicates.append(name)
                continue
            shape = tuple(entry["shape"])
            self._entries[name] = (file, entry["dtype"], shape, base + begin, base + end)

    def __getitem__(self, name: str) -> np.ndarray:
        file, dtype, shape, begin, end = self._entries[name]
        if dtype not in _DTYPES:
            raise ValueError(f"{file}: {name} has dtype {dtype}, readable are {sorted(_DTYPES)}")
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, "r")
        return self._maps[file][begin:end].view(_DTYPES[dtype]).reshape(shape)

    def __iter__(self):
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def write_checkpoint(folder: str | Path, tensors: Mapping[str, np.ndarray], config: dict) -> None:
    """Write `config.json` and one `model.safetensors` as transformers reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # `ascontiguousarray` would give a scalar an axis.
    contiguous = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})

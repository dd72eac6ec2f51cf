"""Short names: a target and the draft that belongs to it."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

DEMO = Path(__file__).parent / "demo"

_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]


@dataclass(frozen=True)
class Pair:
    """A target and its draft: local folders or hub ids."""

    target: str
    draft: str


PAIRS = {
    "demo": Pair(str(DEMO / "qwen35"), str(DEMO / "qwen35-mmflash")),
    "demo-gemma4": Pair(str(DEMO / "gemma4"), str(DEMO / "gemma4-mmflash")),
    "gemma4-e4b": Pair("google/gemma-4-E4B-it", "FSCCS/Gemma4-E4B-it-MMFlash"),
    "qwen35-4b": Pair("Qwen/Qwen3.5-4B", "FSCCS/Qwen3.5-4B-MMFlash"),
}


class CheckpointNotFoundError(ValueError):
    """A name is no short name, no folder and no hub id that can be had."""


def pair(target: str, draft: str | None) -> tuple[Path, Path | None]:
    """Folders of a target and its draft; hub ids are fetched.

    `target` is a short name, a folder or a hub id. `draft` is a folder or a hub id, "mtp" for the
    head in the target's own folder, "none", or None for the draft that the short name brings (no
    draft for other targets).

    Raises:
        CheckpointNotFoundError: one of the two cannot be found.
    """
    named = PAIRS.get(target)
    if draft is None and named is not None:
        draft = named.draft
    found = folder(named.target if named else target)
    if draft is None or draft == "none":
        return found, None
    return found, found if draft == "mtp" else folder(draft)


def folder(name: str) -> Path:
    """The local folder of a checkpoint; a hub id is fetched into the hub's own cache."""
    local = Path(name)
    if local.is_dir():
        return local
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointNotFoundError(
            f"{name!r} is no short name ({', '.join(sorted(PAIRS))}), no folder, and could not be "
            f"fetched from the hub: {reason}"
        ) from None

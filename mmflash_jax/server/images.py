"""Where a request's images may come from.

Data URLs, plain base64, files under one allowed folder and, where that is switched on, http(s)
addresses of the internet (`server/fetch.py`).
"""

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmflash_jax.engine.image_sources import read_data_url
from mmflash_jax.engine.images import ImageError


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """root: folder whose files may be named, None for no files. count: images of a request.
    fetch_s: seconds that fetching an image may take, None for no fetching."""

    root: Path | None = None
    most_bytes: int = 20 * 2**20
    count: int = 8
    fetch_s: float | None = None


def is_http(url: str) -> bool:
    return _scheme(url) in ("http", "https")


def read_image(
    url: str, limits: ImageLimits, *, name: str, fetched: Mapping[str, bytes] | None = None
) -> bytes:
    """The bytes of an image that a request names; http(s) ones are among `fetched`.

    Raises:
        ImageError: it is too large, not readable, or from where nothing is taken.
    """
    scheme = _scheme(url)
    if scheme == "data":
        return _from_data_url(url, limits, name)
    if is_http(url):
        if fetched is not None and url in fetched:
            return fetched[url]
        raise ImageError(
            f"{name}: http(s) addresses are not fetched by this server (--allow-http-images); send "
            "the image as a data URL (data:image/png;base64,...)"
        )
    if scheme == "file":
        return _from_file(url, limits, name)
    if scheme:
        raise ImageError(f"{name}: {scheme!r} addresses are not supported; send a data URL")
    return _from_data_url(f"data:;base64,{url}", limits, name)


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower() if ":" in url[:16] else ""


def _from_data_url(url: str, limits: ImageLimits, name: str) -> bytes:
    # Checked before decoding: three bytes take four characters.
    _check_size(len(url) // 4 * 3, limits, name)
    try:
        return read_data_url(url)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None


def _from_file(url: str, limits: ImageLimits, name: str) -> bytes:
    if limits.root is None:
        raise ImageError(f"{name}: this server reads no files (--image-root)")
    path = _find(urllib.parse.unquote(urllib.parse.urlsplit(url).path), limits.root)
    if path is None:
        # The same words for all, so that nobody learns what exists elsewhere.
        raise ImageError(f"{name}: no such file under the allowed folder")
    _check_size(path.stat().st_size, limits, name)
    return path.read_bytes()


def _find(name: str, root: Path) -> Path | None:
    try:
        # Links are followed first: what counts is where the file really is.
        real = Path(name).resolve(strict=True)
        return real if real.is_relative_to(root.resolve()) and real.is_file() else None
    except (OSError, ValueError):
        return None


def _check_size(count: int, limits: ImageLimits, name: str) -> None:
    if count > limits.most_bytes:
        raise ImageError(f"{name}: {count} bytes, at most {limits.most_bytes} are taken")

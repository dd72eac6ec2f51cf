"""Fetching images that requests name by http(s) address, without a way into the server's network.

A host's addresses are looked up once for a connection, checked, and the connection goes to a
checked address: a name that answers otherwise the next time (DNS rebinding) gains nothing. Each
redirect is a connection of its own and passes the same gate. Host header and TLS name stay those of
the address that was asked for. Proxies of the environment are not used: they would look up names
themselves.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import httpcore2
import httpx2

from mmflash_jax.engine.images import ImageError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 3
AT_ONCE = 16
"""Fetches at one time; others wait, and waiting counts as theirs."""
# Object stores send bytes of no stated kind; the image reader looks at what they are.
KINDS = ("image/", "application/octet-stream", "binary/octet-stream")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RefusedAddressError(Exception):
    """A host whose addresses are not all public."""


class Fetcher:
    """Fetches at most `most_bytes` of an image within `seconds`, redirects included."""

    def __init__(self, *, most_bytes: int, seconds: float):
        self.most_bytes, self.seconds = most_bytes, seconds
        self._gate = asyncio.Semaphore(AT_ONCE)
        # No connection is kept: every fetch is checked anew.
        self._pool = httpcore2.AsyncConnectionPool(
            max_keepalive_connections=0, network_backend=_PublicOnly()
        )

    async def fetch(self, url: str, name: str) -> bytes:
        """The bytes at `url`; `name` stands for the image in errors.

        Raises:
            ImageError: not fetched, for the reason that it names.
        """
        try:
            async with self._gate, asyncio.timeout(self.seconds):
                return await self._follow(httpx2.URL(url))
        except TimeoutError:
            raise ImageError(f"{name}: not fetched within {self.seconds:g} s") from None
        except RefusedAddressError as error:
            raise ImageError(f"{name}: {error}") from None
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None
        except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
            raise ImageError(f"{name}: not a valid address ({error})") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ImageError(f"{name}: cannot be fetched ({reason})") from None

    async def _follow(self, url: httpx2.URL) -> bytes:
        for _ in range(1 + MOST_REDIRECTS):
            if url.scheme not in ("http", "https"):
                raise ImageError(f"redirected to a {url.scheme!r} address")
            if not url.host or url.userinfo:
                raise ImageError("an address needs a host, and no user or password")
            if url.port is not None and not 0 < url.port < 2**16:
                raise ImageError(f"not a valid address (port {url.port})")
            async with self._pool.stream("GET", _core_url(url), headers=_headers(url)) as answer:
                headers = {key.lower(): value.decode("latin-1") for key, value in answer.headers}
                if answer.status in REDIRECTS and b"location" in headers:
                    url = url.join(headers[b"location"])
                    continue
                return await self._read(answer, headers)
        raise ImageError(f"more than {MOST_REDIRECTS} redirects")

    async def _read(self, answer: httpcore2.Response, headers: dict[bytes, str]) -> bytes:
        if answer.status != 200:
            raise ImageError(f"its server answers {answer.status}")
        kind = headers.get(b"content-type", KINDS[1])
        if not kind.lower().startswith(KINDS):
            raise ImageError(f"its server sends {kind!r}, expected an image")
        if headers.get(b"content-encoding", "identity") != "identity":
            raise ImageError("its server compresses what should come as it is")
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length) > self.most_bytes:
            raise ImageError(f"{length} bytes, at most {self.most_bytes} are taken")
        content = bytearray()
        async for part in answer.aiter_stream():
            content += part
            if len(content) > self.most_bytes:
                raise ImageError(f"more than the {self.most_bytes} bytes that are taken")
        return bytes(content)


def _core_url(url: httpx2.URL) -> httpcore2.URL:
    return httpcore2.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


def _headers(url: httpx2.URL) -> list[tuple[bytes, bytes]]:
    return [
        (b"Host", url.netloc),
        (b"User-Agent", b"mmflash-jax"),
        (b"Accept", b"image/*"),
        (b"Accept-Encoding", b"identity"),
    ]


class _PublicOnly(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses only, to the very ones that were looked at."""

    def __init__(self):
        self._network: Any = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in await checked_addresses(host, port):
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as error:
                failure = error
        raise failure


async def checked_addresses(host: str, port: int) -> list[str]:
    """All addresses of a host.

    Raises:
        RefusedAddressError: one of them is not public.
        OSError: there are none.
    """
    addresses = await look_up(host, port)
    if not all(is_public(address) for address in addresses):
        raise RefusedAddressError(
            f"{host!r} is at a private or reserved address, where this server fetches nothing"
        )
    return addresses


async def look_up(host: str, port: int) -> list[str]:
    """Addresses of a name or a number, as the system has them."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(f"{host} is not known: {error.strerror}") from None
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet at large.

    An IPv4 address inside an IPv6 one (mapped, 6to4, Teredo, NAT64) counts too.
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return True
    return ip.is_global and not ip.is_multicast and not ip.is_reserved

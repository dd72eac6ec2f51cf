"""Prompts of a run, checked all at once, their pixels in memory only while they are used."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from tqdm import tqdm

from mmflash_jax.config_train import ChartData, FileData
from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.prompt_files import Line, read_requests
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request

AT_ONCE = 32


class Prompts(Sequence[Prompt]):
    """Encoded requests. Patches of all images of a data set would not fit a host's memory.

    Iteration gives prompts without patches, enough to know their ids and sizes; an index or a slice
    encodes anew and gives them whole.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        requests: Sequence[Request],
        place: Callable[[int], str],
        each: Callable[[list[Prompt]], object] = lambda _: None,
    ):
        """Encode every request once. `each` receives the whole prompts, some at a time, in order.

        place: where a request came from, for messages.

        Raises:
            PromptError: some cannot be encoded; one line for each, file and line first.
        """
        self._encoder, self._requests = encoder, requests
        self._light: list[Prompt] = []
        bad: list[str] = []
        for start in tqdm(range(0, len(requests), AT_ONCE), desc="encode", unit="batch"):
            part = []
            for index, request in enumerate(requests[start : start + AT_ONCE], start):
                try:
                    part.append(encoder.encode(request))
                except (ValueError, OSError) as error:
                    bad.append(f"{place(index)}: {error}")
            if not bad:
                each(part)
                self._light += map(_without_patches, part)
        if bad:
            raise PromptError("\n".join(bad))

    @property
    def requests(self) -> Sequence[Request]:
        return self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._light)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._encoder.encode(request) for request in self._requests[index]]
        return self._encoder.encode(self._requests[index])


def _without_patches(prompt: Prompt) -> Prompt:
    images = tuple(
        dataclasses.replace(image, patches=np.zeros((0, image.patches.shape[1]), np.float32))
        for image in prompt.images
    )
    return dataclasses.replace(prompt, images=images)


def places_of(data: ChartData | FileData, requests: Sequence[Request]) -> Callable[[int], str]:
    """From the index of a request to its file and line, or to its name where there is no file."""
    if isinstance(data, ChartData):
        return lambda index: requests[index].id

    @functools.cache
    def lines() -> list[Line]:
        # Read again only for messages; requests are the lines in order.
        return read_requests(data.path, max_tokens=1, kind=data.kind)

    return lambda index: lines()[index].where

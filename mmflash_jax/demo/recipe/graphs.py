"""Captures a function of static tensors in a CUDA graph; on a CPU it stays what it is."""

from collections.abc import Callable

import torch


def capture(function: Callable[[], None], enabled: bool, warm_up: int = 3) -> Callable[[], None]:
    """Run `function` a few times, then record it; the result replays the recording."""
    if not enabled:
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Copies of new examples run on another stream of this thread's process meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    torch.cuda.empty_cache()
    return graph.replay

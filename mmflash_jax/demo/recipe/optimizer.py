"""Muon for matrices and AdamW for the rest, without host round trips: a CUDA graph can hold it."""

# torch has no public name for its fused list operations.
# ruff: noqa: SLF001

from collections.abc import Sequence

import torch
from torch import Tensor

MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.98)
LARGEST_GRADIENT_NORM = 1.0
SMALLEST_MUON_SIDE = 32
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class MuonAdam:
    """Steps all parameters from their `.grad`; the caller fills the scalar `learning_rate`."""

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], weight_decay: float, dtype: torch.dtype
    ) -> None:
        device = named[0][1].device
        self.parameters = [parameter for _, parameter in named]
        self.learning_rate = torch.zeros((), device=device)
        self.step_count = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.weight_decay, self.dtype = weight_decay, dtype
        self.matrices: dict[tuple[int, ...], list[Tensor]] = {}
        self.others: list[Tensor] = []
        for name, parameter in named:
            if _is_muon_matrix(name, parameter):
                self.matrices.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self.others.append(parameter)
        # One momentum buffer a shape, so that Newton-Schulz runs batched.
        self.momentum = {
            size: torch.zeros((len(group), *size), device=device)
            for size, group in self.matrices.items()
        }
        self.first_moment = [torch.zeros_like(parameter) for parameter in self.others]
        self.second_moment = [torch.zeros_like(parameter) for parameter in self.others]

    def clear_gradients(self) -> None:
        """Drop them rather than zero them: a captured step then allocates its own."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the steps made while a graph was being captured."""
        buffers = [*self.first_moment, *self.second_moment, *self.momentum.values()]
        for buffer in (self.step_count, *buffers):
            buffer.zero_()

    @torch.no_grad()
    def step(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (LARGEST_GRADIENT_NORM / (norm + 1e-6)).clamp(max=1.0))
        self.gradient_norm.copy_(norm)
        self.step_count += 1
        self._adam_step()
        for size, group in self.matrices.items():
            self._muon_step(size, group)

    def _adam_step(self) -> None:
        gradients = [parameter.grad for parameter in self.others]
        first, second = ADAM_BETAS
        torch._foreach_mul_(self.first_moment, first)
        torch._foreach_add_(self.first_moment, gradients, alpha=1 - first)
        torch._foreach_mul_(self.second_moment, second)
        torch._foreach_addcmul_(self.second_moment, gradients, gradients, 1 - second)
        scale = torch._foreach_div(self.second_moment, 1 - second**self.step_count)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, 1e-8)
        update = torch._foreach_div(self.first_moment, scale)
        torch._foreach_mul_(update, -self.learning_rate / (1 - first**self.step_count))
        torch._foreach_add_(self.others, update)

    def _muon_step(self, size: tuple[int, ...], group: list[Tensor]) -> None:
        gradient = torch.stack([parameter.grad for parameter in group])
        momentum = self.momentum[size]
        momentum.mul_(MUON_MOMENTUM).add_(gradient, alpha=1 - MUON_MOMENTUM)
        nesterov = gradient * (1 - MUON_MOMENTUM) + momentum * MUON_MOMENTUM
        # Scaled to the update size that AdamW would make, so both share one learning rate.
        update = orthogonalised(nesterov, self.dtype) * (0.2 * max(size) ** 0.5)
        torch._foreach_mul_(group, 1 - self.learning_rate * self.weight_decay)
        torch._foreach_add_(group, list((update * -self.learning_rate).unbind(0)))


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly the nearest orthogonal matrices, by Newton-Schulz; [count, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    result = matrices.transpose(1, 2) if tall else matrices
    result = (result / (result.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = result @ result.transpose(1, 2)
        result = linear * result + (cubic * gram + quintic * (gram @ gram)) @ result
    return (result.transpose(1, 2) if tall else result).float()


def _is_muon_matrix(name: str, parameter: Tensor) -> bool:
    # Rows of a table are looked up one by one, so their updates have no matrix structure.
    is_table = "embed_tokens" in name or "pos_embed" in name or name == "glyph_head"
    return parameter.ndim == 2 and min(parameter.shape) >= SMALLEST_MUON_SIDE and not is_table

"""One measurement of a draft: decoded with it and without it, compared id by id."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import Answers, answer
from mmflash_jax.evaluation.acceptance import accepted_per_position, pooled_tau
from mmflash_jax.evaluation.exactness import Parity, compare
from mmflash_jax.layers.schema import Params


@dataclass(frozen=True)
class Measured:
    """Both runs over the same prompts; `plain` and `parity` are None where only one was asked for.

    A draft's speed counts only if the answers are the target's own: a wrong verifier agrees with
    any draft. So speeds are None when parity fails.
    """

    drafted: Answers
    plain: Answers | None
    parity: Parity | None

    def figures(self) -> dict[str, Any]:
        """What every report says of a draft. Speed is decoding alone, without compilation."""
        done = self.drafted.completions
        trusted = self.parity is None or self.parity.holds
        compared = self.parity if done else None
        return {
            "prompts": len(done),
            "tau": pooled_tau(done) if done else None,
            "accepted_per_position": accepted_per_position(done) if done else [],
            # None too if an earlier run had made every answer.
            "tokens_per_s": (self.drafted.timing.tokens_per_s or None) if trusted else None,
            "plain_tokens_per_s": self.plain.timing.tokens_per_s
            if self.plain and trusted
            else None,
            "parity": None if compared is None else compared.holds,
            "rows_equal": None if compared is None else sum(compared.equal),
        }


def measure(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    batch: int,
    *,
    title: str = "decode",
    plain: Answers | bool = True,
) -> Measured:
    """Decode `prompts` with the draft of `plan` and, unless `plain` is False, without it.

    plain: answers of the target alone that are known already, in the same dtype.
    """
    drafted = decode_all(plan, params, prompts, batch, title)
    if plain is False:
        return Measured(drafted, None, None)
    if plain is True:
        alone = dataclasses.replace(plan, drafter=NoDraft())
        plain = decode_all(alone, params, prompts, batch, f"{title} plainly")
    parity = compare(plan, params, prompts, drafted.completions, plain.completions)
    return Measured(drafted, plain, parity)


def decode_all(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    batch: int,
    title: str,
) -> Answers:
    """`answer` under a progress bar."""
    with tqdm(total=len(prompts), desc=title, unit="prompt") as bar:
        return answer(plan, params, prompts, batch=batch, on_progress=bar.update)

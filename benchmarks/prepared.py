"""What runs on a demo target share: its answers, their visual scores, and rows to train on.

The target answers the prompts once; any number of runs, of any draft method, read the file.
Features of the target's layers are made in training: they would be far larger.
"""

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target, stop_ids
from mmflash_jax.registry import pair
from mmflash_jax.training.answers import answers_of
from mmflash_jax.training.data import Row, make_row, prompt_requests
from mmflash_jax.training.divergence import Scores
from mmflash_jax.training.prompts import AT_ONCE
from mmflash_jax.training.trainer import media_features, new_drafter
from mmflash_jax.training.visual_kl import score_all, weights_of
from mmflash_jax.weights.hf_config import ConfigError


@dataclass(frozen=True)
class Prepared:
    """rows: with weights of 1; sample: of which prompt each is made.

    scores: by ablation, of every prompt's answer.
    """

    config: TrainConfig
    rows: list[Row]
    sample: list[int]
    prompt_len: list[int]
    answers: list[tuple[int, ...]]
    scores: dict[str, list[Scores | None]]

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError if `config` would train on other rows than these."""
        for name in ("target", "data", "row_length"):
            there, here = getattr(self.config, name), getattr(config, name)
            if there != here:
                raise ConfigError(
                    f"{name} is {there} in the prepared rows and {here} in the config; all methods "
                    "train on the same rows, so make them the same"
                )

    def weights(self, settings: VisualConfig, image_id: int) -> np.ndarray:
        """Token weights `[N, S]` of all rows, as the trainer's `make_row` lays them out."""
        scores = self.scores[settings.ablation]
        width = self.config.row_length
        weight = np.zeros((len(self.rows), width), np.float32)
        for index, (row, sample) in enumerate(zip(self.rows, self.sample, strict=True)):
            answer, begins = self.answers[sample], self.prompt_len[sample]
            made = weights_of(answer, scores[sample], width - begins, image_id, settings)
            weight[index, :begins] = 1.0
            weight[index, begins : len(row.ids)] = made.weight[: width - begins]
        return weight

    def blank_scores(self) -> np.ndarray:
        """Blank-image scores `[N, S]` of tokens that can be a label, NaN elsewhere."""
        width = self.config.row_length
        score = np.full((len(self.rows), width), np.nan, np.float32)
        for index, sample in enumerate(self.sample):
            known, begins = self.scores["blank"][sample], self.prompt_len[sample]
            if known is not None:
                part = known[0][1 : width - begins]
                score[index, begins + 1 : begins + 1 + len(part)] = part
        return score

    def write(self, path: Path) -> None:
        """A file that is there is whole."""
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(self))
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> "Prepared":
        return pickle.loads(path.read_bytes())


@dataclass(frozen=True)
class Loaded:
    """A target in one dtype, with the front end of its checkpoint."""

    folder: Path
    plain: Plan
    params: Any
    encoder: PromptEncoder

    @classmethod
    def of(cls, name: str, dtype: str) -> "Loaded":
        folder, _ = pair(name, "none")
        target, params = load_target(folder, dtype)
        encoder = PromptEncoder.from_checkpoint(folder, target)
        stops = stop_ids(folder, encoder.eos_id)
        return cls(folder, Plan(target, NoDraft(), stops, encoder.vocabulary), params, encoder)

    def drafted(self, config: TrainConfig) -> Plan:
        """The plan with a new draft of the config's kind.

        Raises:
            ConfigError, FitError: such a draft does not belong to this target.
        """
        drafter = new_drafter(config.draft, self.folder, self.plain.target, self.encoder)
        drafter.check_fit(self.plain.target.config)
        return dataclasses.replace(self.plain, drafter=drafter)


def prepare_rows(
    there: Loaded, config: TrainConfig, ablations: Sequence[str], score_batch: int
) -> tuple[Prepared, list[Request]]:
    """Rows of `config`, and the requests of its held-out prompts.

    Answers lie in `config.output` as they come, so a killed run goes on with them. Every prompt is
    encoded once and stays in memory with its patches, up to 0.5 MB each: encoding is slow.
    """
    learn, kept = prompt_requests(config.data, config.generate.max_tokens, config.eval_prompts)
    prompts: list[Prompt] = []
    media: list[np.ndarray] = []
    for start in tqdm(range(0, len(learn), AT_ONCE), desc="encode", unit="batch"):
        part = [there.encoder.encode(request) for request in learn[start : start + AT_ONCE]]
        media += media_features(there.plain, there.params, part)
        prompts += part
    answers = answers_of(there.plain, there.params, prompts, config)
    scores = {
        ablation: score_all(
            there.plain, there.params, learn, prompts, answers, there.encoder,
            VisualConfig(ablation=ablation, batch=score_batch),  # pyright: ignore[reportArgumentType]
        )
        for ablation in ablations
    }  # fmt: skip
    rows, sample = [], []
    for index, (prompt, features, answer) in enumerate(zip(prompts, media, answers, strict=True)):
        row = make_row(prompt, features, answer, config.row_length)
        if row is not None:
            rows.append(row)
            sample.append(index)
    lengths = [len(prompt.ids) for prompt in prompts]
    return Prepared(config, rows, sample, lengths, list(answers), scores), kept

"""Settings of the target's training, and its schedules."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Defaults are those of the shipped weights, trained on one H200."""

    minutes: float = 9.1
    seed: int = 0
    device: str = "cuda"
    graphs: bool = True
    compiled: bool = True
    batch: int = 256
    workers: int = 14
    chunk: int = 256
    pool: int = 400_000
    first_fill: int = 20_000
    glyph_steps: int = 600
    glyph_rate: float = 3e-3
    peak_rate: float = 2.5e-3
    warm_up_steps: int = 200
    decay_share: float = 0.35
    smallest_rate: float = 0.02
    weight_decay: float = 0.01
    glyph_weight: float = 0.2
    ordinary_from: float = 0.35
    ordinary_share: float = 0.5
    evaluate_every_s: float = 60.0
    final_evaluation_s: float = 40.0
    evaluation_count: int = 512
    decode_limit: int = 140
    log_every: int = 250
    most_steps: int = 1_000_000

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear warm-up, flat, linear decay over the last part of the time."""
        warm = min(1.0, (step + 1) / self.warm_up_steps)
        decay = min(1.0, max(self.smallest_rate, (1 - progress) / self.decay_share))
        return self.peak_rate * warm * decay

    def glyph_step_rate(self, step: int) -> float:
        left = 1 - step / self.glyph_steps
        return self.glyph_rate * min(1.0, (step + 1) / 20) * min(1.0, max(0.03, left / 0.4))


def smoke_settings() -> TrainSettings:
    """A few steps of everything on a CPU, to see that it runs; nothing is learnt."""
    return TrainSettings(
        minutes=1.5,
        device="cpu",
        graphs=False,
        compiled=False,
        batch=8,
        workers=1,
        chunk=32,
        pool=128,
        first_fill=32,
        glyph_steps=6,
        warm_up_steps=5,
        evaluate_every_s=1e9,
        final_evaluation_s=0.0,
        evaluation_count=8,
        decode_limit=4,
        log_every=3,
        most_steps=6,
    )

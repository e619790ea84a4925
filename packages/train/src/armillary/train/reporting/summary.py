"""The summary of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Summary:
    """The result of a run, since its start or restart.

    Args:
        first_step: the first step after the start or restart.
        losses: loss of each step from `first_step` on, over all ranks.
        validation: results of the last validation: "loss", and accuracies by task.
        tokens: tokens of these steps, over all ranks.
        seconds: duration of these steps, without validation and saving.
        elapsed: seconds since training began, with validation and saving.
        memory: peak memory of this rank in bytes.
        checkpoint: path of the last checkpoint; None if nothing was saved.
        picture: path of the plot, on rank 0 if one was drawn.
    """

    first_step: int = 1
    losses: list[float] = field(default_factory=list[float])
    validation: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    memory: int = 0
    checkpoint: Path | None = None
    picture: Path | None = None

    @property
    def validation_loss(self) -> float:
        return self.validation.get("loss", float("nan"))

    def text(self, ranks: int) -> str:
        noun = "rank" if ranks == 1 else "ranks"
        if not self.losses:
            return f"nothing left to train: {self.checkpoint} is the last step"
        rate, overhead = self.tokens / self.seconds, self.elapsed - self.seconds
        lines = [
            f"trained {len(self.losses)} steps, {self.tokens:,} tokens in {self.seconds:.0f} s on {ranks} {noun}",
            f"  loss         {self.losses[0]:.4f} -> {self.losses[-1]:.4f}",
            f"  validation   {self.validation_loss:.4f}",
            f"  tokens/s     {rate:,.0f} ({rate / ranks:,.0f} a rank)",
            f"  overhead     {overhead:.0f} s outside of steps: validation, saving, traces",
            f"  peak memory  {self.memory / 2**30:.2f} GiB a rank",
        ]
        lines += [f"  loss curve   {self.picture}"] if self.picture else []
        return "\n".join([*lines, f"  checkpoint   {self.checkpoint}"])

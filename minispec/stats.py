"""What speculation did: one record a round, summed into the report that people read.

Definitions: *accepted length* is the number of tokens that a round emits, the bonus counted,
after the cut at a stop; plain decoding has 1.00. *Acceptance at depth d* is, of the rounds that
got to depth d - 1 and had a child to offer there, the share that accepted one.
"""

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RoundStats:
    """One round. `accepted` counts draft tokens; `offered` the depths at which any was tried."""

    nodes: int
    accepted: int
    offered: int
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float


class Clock:
    """Laps of wall time; waits for the GPU's queue first, so that a lap is what it names."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, self._now()
        return self.last - before


@dataclass
class Report:
    """All rounds of one generation; `new_tokens` includes the one that the prompt gave."""

    rounds: list[RoundStats] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)  # tokens per round, after the cut
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0

    def add(self, stats: RoundStats, emitted: int) -> None:
        """Count a round that put out `emitted` tokens."""
        self.rounds.append(stats)
        self.emitted.append(emitted)

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a round, bonus counted; None without a round."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else None

    @property
    def mean_nodes(self) -> float | None:
        """Tree nodes a round, the root counted."""
        return sum(stats.nodes for stats in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d - 1 is the acceptance at depth d."""
        deepest = max((stats.offered for stats in self.rounds), default=0)
        rates = []
        for depth in range(1, deepest + 1):
            offered = sum(stats.offered >= depth for stats in self.rounds)
            rates.append(sum(stats.accepted >= depth for stats in self.rounds) / offered)
        return rates

    @property
    def decode_seconds(self) -> float:
        """Without the prompt."""
        return self.total_seconds - self.prefill_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens a second: what rounds emitted, over their time."""
        return sum(self.emitted) / self.decode_seconds if self.emitted else None

    def seconds(self) -> dict[str, float]:
        """Where the time went."""
        return {
            "prefill": self.prefill_seconds,
            "draft": sum(stats.draft_seconds for stats in self.rounds),
            "verify": sum(stats.verify_seconds for stats in self.rounds),
            "commit": sum(stats.commit_seconds for stats in self.rounds),
            "total": self.total_seconds,
        }

    def table(self) -> str:
        """The report, for a person."""
        seconds = self.seconds()
        rounds = max(len(self.rounds), 1)
        depth = "  ".join(f"{rate:.2f}" for rate in self.acceptance_by_depth) or "-"
        phases = ", ".join(
            f"{name} {1000 * seconds[name] / rounds:.2f}" for name in ("draft", "verify", "commit")
        )
        lines = [
            ("prompt tokens", f"{self.prompt_tokens} in {self.prefill_seconds:.2f} s"),
            ("new tokens", f"{self.new_tokens} in {self.decode_seconds:.2f} s"),
            ("tokens per second", _number(self.tokens_per_second, 1)),
            ("rounds", f"{len(self.rounds)}, mean tree of {_number(self.mean_nodes, 1)} nodes"),
            ("mean accepted length", f"{_number(self.mean_accepted_length, 2)} (bonus counted)"),
            ("acceptance by depth", depth),
            ("ms a round", phases),
        ]
        return "\n".join(f"  {name:<21} {value}" for name, value in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

"""A row of the matrix, and the page that is made of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..rows import mib

HEAD = (
    "architecture", "status", "plain", "checkpointed", "budget", "taken", "least", "taken",
    "gradients", "graphs", "first step", "step",
)  # fmt: skip
REMARK = 300
"""Characters shown of a warning or an error."""


@dataclass(frozen=True)
class Row:
    """What was found of one architecture, as `measuring.Found` has it."""

    found: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.found.get(name)

    @property
    def is_bad(self) -> bool:
        """A promise is broken, or somebody is refused what a checkpoint would give."""
        if self.status == "refused":
            checkpointed = self._peak("checkpointed")
            return checkpointed is not None and checkpointed <= self.budget
        inactive = self.status == "inactive" and not self.warned
        return inactive or self.status in ("over", "failed")

    def _peak(self, way: str) -> int | None:
        found = self.found.get(way) or {}
        return max(found["peaks"]) if "peaks" in found else None

    def _ratio(self, what: str) -> str:
        """Of seconds at the budget, or at the least, to plain's; none if those are not known."""
        ours = self.at_budget or self.at_least
        its, plain = (found and found[what] for found in (ours, self.plain))
        return f"{its / plain:.2f}" if its and plain and plain > 0 else ""

    def cells(self) -> list[str]:
        """A line of the table: MiB, and seconds relative to plain compile's."""
        error = "" if self.gradient_error is None else f"{self.gradient_error:.0e}"
        return [
            self.name,
            self.status,
            mib(self._peak("plain")),
            mib(self._peak("checkpointed")),
            mib(self.budget),
            mib(self._peak("at_budget")),
            mib(self.least),
            mib(self._peak("at_least")),
            error,
            "" if self.graphs is None else str(self.graphs),
            self._ratio("first_seconds"),
            self._ratio("step_seconds"),
        ]

    def remarks(self) -> list[str]:
        """What went wrong, and what was warned of."""
        said = [self.error] if self.error else []
        lines = (" ".join(one.split()) for one in (*said, *(self.warned or ())))
        return [line[:REMARK] for line in lines]


def summary(rows: Sequence[Row]) -> str:
    """How many there are of each status."""
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def page(machine: dict[str, Any], rows: Sequence[Row], of_all: int) -> str:
    """The page of the docs, in Markdown; there are architectures ``of_all``."""
    commits = ", ".join(dict.fromkeys(row.commit for row in rows if row.commit))
    lines = [
        "# Architectures",
        "",
        "Small configurations of architectures as their users train them, with random weights",
        "and AdamW, on the CPU. Made by `python -m benchmarks.architectures --json OUT`, and",
        f"written here by `--page OUT`. torch {machine['torch']}, {machine['threads']} threads,",
        f"{machine['date'][:10]}. Sizes are MiB at the measured",
        "peak of all iterations but the first. *Plain* is plain `torch.compile`; *checkpointed*",
        "has each repeated block under `torch.utils.checkpoint`. The *budget* is 60 % of",
        "*plain*, and *taken* the peak within it. *Least* is the budget that the error for",
        "1 MiB names, and the second *taken* the peak within that; a smaller budget may still",
        "be met. A row is *ok* if both budgets were met, and *refused* if an error refused the",
        "first. *Gradients* is the largest relative difference from plain's. *First step* is",
        "the time until steps are steady, and *step* that of a steady step, both relative to",
        "plain. Other programs ran beside these, so both are rough, and left out where the",
        "machine was too busy.",
        "",
        f"**{summary(rows)}.** {len(rows)} of {of_all} architectures are measured, at {commits}.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    remarks = [f"* **{row.name}**: {line}" for row in rows for line in row.remarks()]
    if remarks:
        lines += ["", "## Warnings and remarks", "", *remarks]
    return "\n".join(lines) + "\n"

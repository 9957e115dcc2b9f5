"""Training steps of every variant against compile's: losses and gradients must agree."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from .rows import format_table
from .runner import Case, Runner, Timing, load_gradients
from .training import gradient_error
from .ways import REFERENCE, Variant


@dataclass(frozen=True)
class Agreement:
    """How far the training steps of one variant are from compile's."""

    variant: str
    loss_error: float | None = None
    first_gradient_error: float | None = None
    last_gradient_error: float | None = None
    last_loss: float | None = None
    error: str | None = None

    @property
    def agrees(self) -> bool:
        """Losses and gradients equal to fp32 tolerance; later gradients a little less so."""
        errors = (self.loss_error, self.first_gradient_error, self.last_gradient_error)
        limits = (1e-5, 1e-4, 1e-3)
        return all(e is not None and e <= limit for e, limit in zip(errors, limits, strict=True))


class Checker(Runner):
    """Trains every variant for some steps under one seed and compares with compile."""

    def __init__(self, case: Case, folder: Path, steps: int, optimizer: str) -> None:
        super().__init__(case, Timing(0, 0, 2, warm_caches=True), folder)
        self.steps, self.optimizer = steps, optimizer
        self.losses: list[float] = []

    def check(self, variants: list[Variant]) -> list[Agreement]:
        """One agreement per variant, compile's first."""
        others = [variant for variant in variants if variant != REFERENCE]
        return [self._check(variant) for variant in (REFERENCE, *others)]

    def _check(self, variant: Variant) -> Agreement:
        with self.start(variant) as worker:
            if not self.prepare(worker):
                return Agreement(variant.name, error=self.rows[variant.name].error)
            path = str(self.folder / f"{variant.name}.train")
            answer = worker.ask("train", path=path, steps=self.steps, optimizer=self.optimizer)
        if "error" in answer:
            return Agreement(variant.name, error=answer["error"])
        self.losses = self.losses or answer["losses"]
        return self._agreement(variant, answer["losses"])

    def _agreement(self, variant: Variant, losses: list[float]) -> Agreement:
        pairs = zip(losses, self.losses, strict=True)
        loss_error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        first, last = (
            gradient_error(
                *(load_gradients(self.folder / f"{name}.train.{moment}") for name in names)
            )
            for names in [(variant.name, REFERENCE.name)]
            for moment in ("first", "last")
        )
        return Agreement(variant.name, loss_error, first, last, losses[-1])


def check_case(case: Case, variants: list[Variant], steps: int, optimizer: str) -> list[Agreement]:
    """Compare training steps on one model, with temporary files of their own."""
    with tempfile.TemporaryDirectory(prefix="fxremat-check-") as folder:
        return Checker(case, Path(folder), steps, optimizer).check(variants)


def agreement_table(agreements: list[Agreement]) -> str:
    """One line per variant."""
    head = ["variant", "last loss", "losses", "first gradients", "last gradients", "agrees"]
    return format_table([head, *map(_line, agreements)])


def _line(agreement: Agreement) -> list[str]:
    if agreement.error is not None:
        return [agreement.variant, "", "", "", "", agreement.error.splitlines()[0]]
    errors = (
        agreement.loss_error,
        agreement.first_gradient_error,
        agreement.last_gradient_error,
    )
    return [
        agreement.variant,
        f"{agreement.last_loss:.6f}",
        *(f"{error:.1e}" for error in errors),
        "yes" if agreement.agrees else "NO",
    ]

"""Which forms a graph takes: a choice is fitted once, and made again by what a fit taught."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fxremat.compiling import choosing
from fxremat.compiling.choosing import Fitted, Forms, fit_in_forms
from fxremat.core.problem import Alternative, Op, Problem, Value


def op(name: str, workspace: int) -> Op:
    return Op(name, (), (f"{name} out",), 1.0, workspace_bytes=workspace)


def forms(names: tuple[str, ...] = ("other",)) -> Forms:
    """Two ops and another form of the second; a solver that always takes ``names``."""
    values = tuple(Value(f"{name} out", 8) for name in ("first", "second", "third"))
    other = Alternative("other", ops=(op("third", 30),), outputs=(("second out", "third out"),))
    problem = Problem(
        "two", values, (op("first", 10), op("second", 20)), outputs=("second out",),
        alternatives=(other,),
    )  # fmt: skip
    asked = SimpleNamespace(variants=names, peak_bytes=100)
    run = SimpleNamespace(answer=lambda *_: asked)
    return Forms(cast(Any, run), (), cast(Any, None), problem)


def test_what_a_fit_showed_is_known_by_the_names_of_ops() -> None:
    shown = SimpleNamespace(problem=SimpleNamespace(ops=(op("second", 2), op("third", 3))))
    known = forms().knowing(cast(Any, SimpleNamespace(run=SimpleNamespace(found=shown)))).problem
    assert [one.workspace_bytes for one in known.ops] == [10, 2]
    assert [one.workspace_bytes for one in known.alternatives[0].ops] == [3]


def test_a_choice_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another budget, or what is known, leads to it; its result is the same again."""
    fits: list[Any] = []

    def fit(_: Forms, names: tuple[str, ...]) -> Any:
        fits.append(names)
        return SimpleNamespace(run=SimpleNamespace(found=SimpleNamespace(problem=given.problem)))

    monkeypatch.setattr(Forms, "_fit", fit)
    given = forms()
    found = given.fit(200)
    assert found is not None
    assert given.fit(0) is found
    assert given.knowing(found).fit(0) is found
    assert fits == [("other",)]


@pytest.mark.parametrize(("names", "budget"), [((), 0), (("other",), 99)])
def test_nothing_to_fit(names: tuple[str, ...], budget: int) -> None:
    assert forms(names).fit(budget) is None


def test_the_quickest_forms_of_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the solver takes when it is given the least peak, and not nothing."""
    given = forms()
    answers = {0: ("least",), 100: ("quick",)}
    run = SimpleNamespace(
        answer=lambda budget, *_: SimpleNamespace(variants=answers[budget], peak_bytes=100)
    )
    fits: list[Any] = []
    monkeypatch.setattr(given, "plain", run)
    monkeypatch.setattr(Forms, "_fit", lambda _, names: fits.append(names))
    given.fit(0)
    given.quickest_of_least()
    assert fits == [("least",), ("quick",)]


@pytest.mark.parametrize("budget", [5, 10])
def test_the_quickest_forms_are_tried_where_the_others_take_too_much(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """And where they take too much as well, theirs is the least that an error names."""
    request = SimpleNamespace(wanted_bytes=None, allow_lossy=False)
    plan = SimpleNamespace(peak_bytes=100)
    run: Any = SimpleNamespace(budget=budget, request=request, solve=lambda _: plan)

    def fitted(peak: int) -> Fitted:
        return Fitted(run, cast(Any, SimpleNamespace(peak_bytes=peak)), 1)

    others = SimpleNamespace(fit=lambda _: fitted(50), quickest_of_least=lambda: fitted(9))
    others.knowing = lambda _: others
    monkeypatch.setattr(choosing, "_fits_as_it_is", lambda *_: False)
    monkeypatch.setattr(choosing, "_forms", lambda *_, **__: others)
    monkeypatch.setattr(choosing, "fit", lambda _: (SimpleNamespace(peak_bytes=100), 1))
    found = fit_in_forms(run)
    assert found.split.peak_bytes == 9
    assert found.over == (budget == 5)

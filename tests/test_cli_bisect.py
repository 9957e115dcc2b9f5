"""`bisect` names the part of fxremat that makes the difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxremat.cli import main
from fxremat.cli.bisect import ALL_OFF, PARTS

HEAD = "import os, sys\ndef on(name, value): return os.environ.get('FXREMAT_' + name) != value\n"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FXREMAT_")]:
        monkeypatch.delenv(name)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return str(path)


def test_the_part_whose_absence_mends_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "sys.exit(3 if on('VARIANTS', 'none') and on('DISABLE', '1') else 0)"
    assert main(["bisect", script(tmp_path, fails)]) == 0
    out = capsys.readouterr().out
    assert out.count("exit status 3") == len(PARTS)
    assert "found: operator variants (FXREMAT_VARIANTS=none)" in out
    assert out.count("found:") == 1


def test_numbers_are_compared_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with arguments of the script's own, and more than one part."""
    text = (
        "print('loss 9')\n"
        "wrong = on('SOLVER', 'greedy') and on('OP_TIMES', 'roofline') and on('DISABLE', '1')\n"
        "print('loss', 2.5 + wrong * float(sys.argv[2]))\n"
    )
    given = ["bisect", "--measure", r"loss (\S+)", script(tmp_path, text), "--by", "0.5"]
    status = main(given)
    out = capsys.readouterr().out
    assert "found: measured times" in out
    assert "found: the best of all solvers" in out
    assert out.count("found:") == 2
    assert status == 0


def test_it_says_where_nothing_or_no_single_part_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", script(tmp_path, "sys.exit(1)")]) == 1
    assert "fxremat makes no difference" in capsys.readouterr().out
    fails = "if on('DISABLE', '1'): sys.exit('it broke')"
    assert main(["bisect", script(tmp_path, fails)]) == 1
    out = capsys.readouterr().out
    assert "no single part makes the difference" in out
    assert out.endswith("it broke\n")


def test_wrong_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = script(tmp_path, "pass")
    for given in (
        ["bisect", str(tmp_path / "nothing.py")],
        ["bisect", "--measure", "loss", silent],
        ["bisect", "--measure", "(", silent],
        ["bisect", "--measure", "(x)", silent],
    ):
        assert main(given) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_each_part_is_an_option_that_takes_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxremat.options import disabled, parse_options

    for setting in PARTS.values():
        name, _, value = setting.partition("=")
        default = parse_options({}, device_total_bytes=None)
        monkeypatch.setenv(f"FXREMAT_{name}", value)
        given = getattr(parse_options({}, device_total_bytes=None), name.lower())
        assert given != getattr(default, name.lower()) or given is False
        monkeypatch.delenv(f"FXREMAT_{name}")
    monkeypatch.setenv(*f"FXREMAT_{ALL_OFF}".split("="))
    assert disabled()

"""Files of answers: whole or absent, and never another question's."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxremat.disk_cache import Answers, write_whole

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
QUESTIONS = st.dictionaries(st.text(max_size=3), JSON, max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUESTIONS, JSON, QUESTIONS)
def test_an_answer_belongs_to_its_question(
    tmp_path: Path, question: dict[str, Any], answer: Any, other: dict[str, Any]
) -> None:
    answers = Answers(tmp_path / str(len(list(tmp_path.iterdir()))))
    assert answers.read(question) is None
    answers.keep(question, answer)
    assert answers.read(question) == answer
    if json.dumps(other, sort_keys=True) != json.dumps(question, sort_keys=True):
        assert answers.read(other) is None


def test_a_file_of_another_question_is_not_believed(tmp_path: Path) -> None:
    """As if two questions had one digest."""
    answers = Answers(tmp_path)
    answers.keep({"asked": 1}, "one")
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    data["question"]["asked"] = 2
    path.write_text(json.dumps(data))
    assert answers.read({"asked": 1}) is None


def test_no_answer_outlives_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(tmp_path)
    answers.keep({}, 1)
    monkeypatch.setattr("fxremat.disk_cache.build", lambda: "another")
    assert answers.read({}) is None


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here is no directory")
    answers = Answers(file / "answers")
    answers.keep({}, 1)
    assert answers.read({}) is None


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    Answers(tmp_path).keep({}, 1)
    assert list(tmp_path.iterdir()) == []


def test_several_writers_at_once(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 50_000]
    write_whole(path, texts[0])

    def write(text: str) -> None:
        for _ in range(50):
            write_whole(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]

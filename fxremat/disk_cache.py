"""Answers kept on disk, so that no question is answered twice.

A question is JSON data with everything that its answer depends on; the digest of our sources is
added here, so that no answer outlives a change of them. Nothing is believed of a file: one that
cannot be read or answers another question is ignored, and replaced by the next answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat.version import build

FORMAT = "fxremat-answer/1"

Question = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """A directory of answers, one file each."""

    directory: Path

    def read(self, question: Question) -> Any:
        """The answer, None where there is none."""
        question = _versioned(question)
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(self._path(question).read_text(encoding="utf-8"))
            if data["format"] == FORMAT and data["question"] == question:
                return data["answer"]
        return None

    def keep(self, question: Question, answer: Any) -> None:
        """Write an answer; a directory that cannot be written is no reason to fail."""
        question = _versioned(question)
        data = {"format": FORMAT, "question": question, "answer": answer}
        write_whole(self._path(question), json.dumps(data))

    def _path(self, question: Question) -> Path:
        text = json.dumps(question, sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _versioned(question: Question) -> Question:
    return {**question, "fxremat": build()}


def write_whole(path: Path, text: str) -> None:
    """All of the file or nothing, for readers in other processes; nothing where that fails."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise

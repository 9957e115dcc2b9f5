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
    """A directory of answers, one file each; a question that is None has none, and is not kept."""

    directory: Path

    def read(self, question: Question | None) -> Any:
        """The answer, None where there is none."""
        if question is None:
            return None
        path, asked = self._asked(question)
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if all(data[name] == value for name, value in asked.items()):
                return data["answer"]
        return None

    def keep(self, question: Question | None, answer: Any) -> None:
        """Write an answer; a directory that cannot be written is no reason to fail."""
        if question is not None:
            path, asked = self._asked(question)
            write_whole(path, json.dumps({**asked, "answer": answer}))

    def _asked(self, question: Question) -> tuple[Path, dict[str, Any]]:
        """The file of an answer, and what it says of the question."""
        question = {**question, "fxremat": build()}
        name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.directory / f"{name}.json", {"format": FORMAT, "question": question}


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

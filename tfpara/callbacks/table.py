"""A CSV file of scores."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from tfpara import files
from tfpara.typing import Json


class Table:
    """A CSV file that grows by rows. A row that a killed process has begun to write is removed.

    The file need not exist. `opener` is the function of `tfpara.files` that opens it.
    """

    def __init__(self, path: Path, opener: Callable[[str, int], int]) -> None:
        self.path, self._opener = path, opener

    def rows(self) -> list[dict[str, Json]]:
        """Returns the rows, each as texts by column."""
        return _rows_of(self._text())

    def add(self, rows: Sequence[dict[str, Json]]) -> None:
        """Appends rows, which must have the table's columns, by a single `write` system call."""
        kept, text = self._text(), io.StringIO()
        # If the table has only a header, a new header with the columns of these rows replaces it.
        if not _rows_of(kept):
            kept = ""
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        if not kept:
            writer.writeheader()
        writer.writerows(rows)
        if self.path.exists() and self.path.stat().st_size != len(kept.encode()):
            with files.whole(self.path) as place:
                place.write_text(kept)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0, opener=self._opener) as file:
            file.write(text.getvalue().encode())

    def rewrite(self, rows: Sequence[dict[str, Json]], columns: Sequence[str]) -> None:
        """Replaces the table by these rows and columns; values that a row lacks are empty."""
        with files.whole(self.path) as place, place.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, columns, restval="", extrasaction="ignore", lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(rows)

    def _text(self) -> str:
        if not self.path.exists():
            return ""
        with open(self.path, "rb", opener=self._opener) as file:
            text = file.read().decode(errors="replace")
        return text[: text.rfind("\n") + 1]


def _rows_of(text: str) -> list[dict[str, Json]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))

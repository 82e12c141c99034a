"""Sentences to read aloud: from the user's text, or from Python's own documentation."""

import re
from pathlib import Path

MIN_WORDS, MAX_WORDS = 4, 20

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z])")
_SPOKEN = re.compile(r"[A-Za-z][A-Za-z' ,;:-]*[.!?]?")


def read(path: str) -> str:
    """Reads the text of a UTF-8 file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not UTF-8, or has no sentence of 4 to 20 words.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"text file {path} does not exist. Give a file of English sentences"
        )
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text file {path} is not UTF-8 at byte {error.start}. Convert it"
        ) from error
    if not sentences(text):
        raise ValueError(
            f"text file {path} has no sentence of {MIN_WORDS} to {MAX_WORDS} words made of English"
            " letters. Give plain English prose"
        )
    return text


def default() -> str:
    """Returns about half a megabyte of English: `pydoc_data.topics`, in a fixed order."""
    from pydoc_data import topics  # imported here, since it is large and not needed elsewhere

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def sentences(text: str) -> list[str]:
    """Returns the sentences of 4 to 20 plain English words, in order, without repetitions.

    Paragraphs end at an empty line. Marks of emphasis and quotation are dropped. Sentences with
    digits, code or other symbols are left out, since it is not clear how to read them aloud.
    """
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        for sentence in _SENTENCE_END.split(flat):
            plain = " ".join(re.sub(r"[\"*`()]", " ", sentence).split())
            plain = re.sub(r" (?=[,.;:!?])", "", plain)
            if _SPOKEN.fullmatch(plain) and MIN_WORDS <= len(plain.split()) <= MAX_WORDS:
                found[plain] = None
    return list(found)

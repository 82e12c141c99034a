"""Writes matrices for Kaldi's programs, such as log-likelihoods for its decoders."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from input import kaldi_tables, packages
from input.records import CorpusError
from tfpara.files import naming

_AUTOMATIC = 1  # kAutomaticMethod, one of Kaldi's methods of compression


def prepare(path_prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Makes the directory of PREFIX.ark and PREFIX.scp; call it before long work.

    Returns:
      The paths of the archive and of the table.

    Raises:
      ValueError: the path has white space or ends in /, or kaldiio is not installed.
      OSError: the directory cannot be made.
    """
    archive = Path(os.path.abspath(f"{os.fspath(path_prefix)}.ark"))
    if any(character.isspace() for character in str(archive)):
        raise ValueError(f"Kaldi's tables cannot name a path with white space. Received: {archive}")
    if archive.name == ".ark":
        raise ValueError(f"no name before .ark and .scp. Received: {archive}. Add one after the /")
    packages.load("kaldiio")
    archive.parent.mkdir(parents=True, exist_ok=True)
    return archive, archive.with_suffix(".scp")


def write_matrices(
    path_prefix: str | os.PathLike[str],
    matrices: Iterable[tuple[str, np.ndarray]],
    compress: bool = False,
) -> tuple[Path, Path]:
    """Writes PREFIX.ark and its table PREFIX.scp, as Kaldi's `copy-feats ark,scp:` does.

    Matrices are taken one at a time, in any order. The table is sorted by key, and has the absolute
    path of the archive. Both files appear only when complete, the table last.

    Args:
      path_prefix: PREFIX, the path of the files without `.ark` and `.scp`.
      matrices: (utterance, float [num_frames, dim]); all of equal width, and finite as float32.
      compress: whether to round each number to 8 bits (Kaldi's compressed matrix); the file has a
        quarter of the size.

    Returns:
      The paths of the archive and of the table.

    Raises:
      CorpusError: a key is empty, has ASCII white space or control characters, or is there twice;
        or a matrix is empty, of another shape, or not finite as float32. Then nothing is written,
        and older files stay.
      ValueError, OSError: as `prepare`.
    """
    archive, table = prepare(path_prefix)
    partial = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in (archive, table)]
    try:
        with naming(archive), open(partial[0], "wb") as file:
            offsets = _write_archive(file, matrices, compress)
            _sync(file)
        with naming(table), open(partial[1], "wb") as file:
            for key in sorted(offsets):
                file.write(f"{key} {archive}:{offsets[key]}\n".encode())
            _sync(file)
        # An old table is removed before the archive is replaced, because the offsets in the table
        # are wrong for the new archive. So if the process ends in between, no wrong table is left.
        table.unlink(missing_ok=True)
        partial[0].replace(archive)
        partial[1].replace(table)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return archive, table


def _write_archive(
    file: BinaryIO, matrices: Iterable[tuple[str, np.ndarray]], compress: bool
) -> dict[str, int]:
    """Writes the archive; returns the byte offset of each matrix."""
    kaldiio = packages.load("kaldiio")
    offsets: dict[str, int] = {}
    width = None
    for key, matrix in matrices:
        rounded = _checked(key, matrix, width)
        if key in offsets:
            raise CorpusError(f"utterance {key} is there twice")
        width = matrix.shape[1]
        offsets[key] = file.tell() + len(f"{key} ".encode())
        kaldiio.save_ark(
            file,
            {key: rounded},
            compression_method=_AUTOMATIC if compress else None,
        )
    if not offsets:
        raise CorpusError("there is no matrix to write")
    return offsets


def _checked(key: str, matrix: np.ndarray, width: int | None) -> np.ndarray:
    """Returns the matrix as float32, if it can be written."""
    if not kaldi_tables.is_key(key):
        raise CorpusError(f"a key of an archive must be one word. Received: {key!r}")
    if matrix.ndim != 2 or 0 in matrix.shape or (width and matrix.shape[1] != width):
        expected = f"[num_frames, {width}]" if width else "[num_frames, dim]"
        raise CorpusError(
            f"the matrix of utterance {key} must be {expected}, not empty. Received:"
            f" {list(matrix.shape)}"
        )
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(matrix, np.float32)
    if not np.isfinite(rounded).all():
        row, column = np.argwhere(~np.isfinite(rounded))[0]
        raise CorpusError(
            f"the matrix of utterance {key} has {matrix[row, column]} in frame {row}, column"
            f" {column}; Kaldi's decoders need finite numbers of float32"
        )
    return rounded


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

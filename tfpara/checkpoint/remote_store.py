"""Checkpoints in an object store, which can neither rename nor lock files, nor append to them.

A worker writes its part on its own machine, and then uploads it. A checkpoint is complete when it
has a manifest, which is written last and never overwritten. Each run has a folder of its own for
its parts. So a run that was believed dead, and writes again, cannot damage a checkpoint of the next
run.

DIRECTORY/checkpoint-00000012/manifest.json
DIRECTORY/checkpoint-00000012/5c1f09aa/part-00000.index, …
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.lease import Lease
from tfpara.checkpoint.store import MANIFEST, NAME, CheckpointError, Store, folder_of
from tfpara.remote_files import RemoteFolder, temporary_folder
from tfpara.typing import Json


class RemoteStore(Store):
    """A directory at a URL; the methods raise what those of `RemoteFolder` raise."""

    directory: str

    def __init__(self, directory: str, keep: int) -> None:
        super().__init__(directory, keep)
        self._folder = RemoteFolder(directory)
        self._lease: Lease | None = None
        self._copies = contextlib.ExitStack()
        self._copied: Path | None = None  # the folder of the local copies of files

    def _key(self) -> str:
        return self._folder.url

    def _take(self) -> None:
        lease = Lease(self._folder, self.mark)
        lease.take()
        self._lease = lease
        try:
            self._folder.remove(self._incomplete(self._folder.sizes()))
        except BaseException:
            self._let_go()
            raise

    def _incomplete(self, names: Mapping[str, int]) -> list[str]:
        """Returns the files of checkpoints that other runs have begun, but not completed."""
        # Parts of this run are left out, because this run may be writing a checkpoint now: in an
        # elastic run a worker may become the chief, and take the lock, during a checkpoint.
        places = ((name, *name.split("/")[:2]) for name in names if "/" in name)
        begun = [place for place in places if NAME.fullmatch(place[1]) and place[2] != self.mark]
        return [name for name, at, _ in begun if f"{at}/{MANIFEST}" not in names]

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None

    def numbers(self) -> list[int]:
        found = (name.split("/") for name in self._folder.sizes())
        matches = [NAME.fullmatch(at) for at, *rest in found if rest == [MANIFEST]]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, number: int) -> str:
        return self._folder.place(folder_of(number))

    def begin(self, number: int) -> None:
        self.abandon(number)

    def _staging(self, number: int) -> contextlib.AbstractContextManager[Path]:
        return temporary_folder()

    def _keep_file(self, number: int, path: Path) -> None:
        self._folder.upload(path, f"{self._parts(number)}/{path.name}")

    def _publish(self, number: int, manifest: Mapping[str, Json]) -> None:
        there = self._folder.sizes(self._parts(number))
        for name, mark in manifest["files"].items():
            part = f"{self._parts(number)}/{name}"
            if there.get(part) != mark["bytes"]:
                raise CheckpointError(
                    f"{self._folder.place(part)} is not there for the chief on "
                    f"{socket.gethostname()}: {self.directory} must be one directory that all "
                    "workers share."
                )
        self.lock()
        if self._lease is not None:
            self._lease.renew()
        text = manifests.text({**manifest, manifests.FOLDER: self.mark})
        if not self._folder.create(f"{folder_of(number)}/{MANIFEST}", text.encode()):
            raise CheckpointError(
                f"{self.path(number)} was written by another run meanwhile. Give this run a "
                "directory of its own."
            )

    def abandon(self, number: int) -> None:
        # Only this run's own parts are removed. If this run has stood still, another run may have
        # the lease now, and may be writing a checkpoint with the same number.
        with contextlib.suppress(OSError):
            names = self._folder.sizes(folder_of(number))
            if f"{folder_of(number)}/{MANIFEST}" not in names:
                own = f"{self._parts(number)}/"
                self._folder.remove(name for name in names if name.startswith(own))

    def _manifest(self, number: int) -> bytes:
        return self._folder.read(f"{folder_of(number)}/{MANIFEST}")

    def _size(self, number: int, name: str) -> int:
        return self._folder.size(f"{folder_of(number)}/{name}")

    def _copy(self, number: int, name: str) -> Path:
        if self._copied is None:
            self._copied = self._copies.enter_context(temporary_folder())
        path = self._copied / folder_of(number) / name
        if not path.exists():
            self._folder.download(f"{folder_of(number)}/{name}", path)
        return path

    def drop_copies(self) -> None:
        self._copies.close()
        self._copied = None

    def remove(self, number: int) -> None:
        # The process may be killed before it has removed all files. The manifest is removed first,
        # so that the remaining files then do not look like a complete checkpoint.
        with contextlib.suppress(OSError):
            self._folder.remove([f"{folder_of(number)}/{MANIFEST}"])
            self._folder.remove(self._folder.sizes(folder_of(number)))

    def append(self, name: str, line: str) -> None:
        try:
            former = self._folder.read(name)
        except FileNotFoundError:
            former = b""
        self._folder.write(name, former + f"{line}\n".encode())

    def _parts(self, number: int) -> str:
        return f"{folder_of(number)}/{self.mark}"

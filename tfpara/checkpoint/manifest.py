"""The manifest of a checkpoint as text; its key "sha256" is the checksum of all others."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tfpara.typing import Json

FORMAT = 2
_ENDINGS = (".index", ".data-00000-of-00001")  # the endings of the names of a part's two files
_SUM = "sha256"
# In a store that cannot rename, each run puts the parts' files into a folder of its own within the
# checkpoint's folder. The value of this key is that folder's name. Without the key, the files are
# in the checkpoint's folder itself.
FOLDER = "folder"
_FOLDER = re.compile("[0-9a-f]{1,32}")
# The keys of every manifest, and the types of their values. "position.epoch" means the key "epoch"
# in the object that is the value of "position".
_FIELDS = {
    "files": dict,
    "workers": int,
    "run": dict,
    "versions": dict,
    "position": dict,
    "position.epoch": int,
    "position.finished": bool,
    "states": dict,
}
# The manifest of a synchronous run also has the keys of `_OF_SYNC`. The manifest of an asynchronous
# run also has the key of `_OF_ASYNC`.
_OF_SYNC = {
    "replicas": int,
    "bucket_sizes": list,
    "position.steps": int,
    "position.minibatches": int,
}
_OF_ASYNC = {"position.within": bool}


def text(content: Mapping[str, Json]) -> str:
    """Returns a manifest with this content; values that JSON cannot carry become their `repr`."""
    content = {**content, "format": FORMAT}
    content.pop(_SUM, None)  # Content that was read from a manifest still has its old checksum.
    content = json.loads(json.dumps(content, default=repr))
    return json.dumps({**content, _SUM: _sum(content)}, indent=1, sort_keys=True)


def parsed(written: bytes) -> dict[str, Json]:
    """Returns a manifest's content; raises ValueError if it is damaged or of another format."""
    try:
        content = json.loads(written.decode())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        is_whole = content.pop(_SUM, None) == _sum(content)
    except RecursionError:
        raise ValueError("it is no manifest: its brackets are nested too deeply") from None
    if content.get("format") != FORMAT:
        found = repr(content.get("format"))[:40]
        raise ValueError(f"it has format {found}; this version reads {FORMAT}")
    if not is_whole:
        raise ValueError("it is damaged: its SHA-256 is not as written")
    for name, kind in _FIELDS.items():
        _check(content, name, kind)
    for name, kind in (_OF_ASYNC if is_async(content) else _OF_SYNC).items():
        _check(content, name, kind)
    _check_files(content)
    return content


def is_async(content: Mapping[str, Json]) -> bool:
    """Returns whether a manifest is of an asynchronous run."""
    return "within" in content["position"]


def _sum(content: Mapping[str, Json]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check(content: Mapping[str, Json], name: str, kind: type) -> None:
    value: Any = content
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    right = type(value) is kind
    if not right or (kind is int and int(value) < 0):
        raise ValueError(
            f"its {name} is {str(value)[:40]!r} in place of a {kind.__name__}: it is damaged"
        )


def _check_files(content: Mapping[str, Json]) -> None:
    """Raises ValueError unless the listed files are the parts of all workers."""
    files, workers = content["files"], content["workers"]
    # The number of workers is checked first. If it is wrong, it may be so large that a list of all
    # names would not fit into memory.
    if not workers or len(files) != workers * len(_ENDINGS):
        raise ValueError(f"it lists {len(files)} files for the parts of {workers} workers")
    if not _FOLDER.fullmatch(str(content.get(FOLDER, "0"))):
        raise ValueError(
            f"its {FOLDER} is {str(content[FOLDER])[:40]!r}, which is no mark of a run"
        )
    for name in (f"{part(rank)}{ending}" for rank in range(workers) for ending in _ENDINGS):
        mark = files.get(name)
        if not isinstance(mark, dict) or set(mark) != {"bytes", "sha256"}:
            raise ValueError(f"it has no size and SHA-256 of {name}")


def part(rank: int) -> str:
    """Returns the prefix of the files of a worker's part."""
    return f"part-{rank:05d}"


def inside(manifest: Mapping[str, Json], name: str) -> str:
    """Returns the path within its checkpoint of the file `name`."""
    return f"{manifest[FOLDER]}/{name}" if FOLDER in manifest else name

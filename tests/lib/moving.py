"""The diffs of the pages on moving to tfpara, and the other programs that they give."""

import re

from tests.lib import examples
from tests.lib.diffs import before


def _diffs(page: str) -> list[str]:
    text = (examples.ROOT / "docs" / page).read_text()
    return re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)


MIRRORED, HOROVOD, HOROVOD_LOOP = _diffs("moving.md")
(TORCH,) = _diffs("moving/pytorch.md")
CNTK, *_ = _diffs("moving/bmuf.md")


def other(name: str, diff: str) -> str:
    """The program that becomes an example of ours by a diff."""
    return before((examples.ROOT / f"tfpara/examples/{name}.py").read_text(), diff)

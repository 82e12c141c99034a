"""The diffs of the pages on moving to tfpara."""

import re

from tests.lib import examples


def _diffs(page: str) -> list[str]:
    text = (examples.ROOT / "docs" / page).read_text()
    return re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)


MIRRORED, HOROVOD, HOROVOD_LOOP = _diffs("moving.md")
(TORCH,) = _diffs("moving/pytorch.md")
CNTK, *_ = _diffs("moving/bmuf.md")

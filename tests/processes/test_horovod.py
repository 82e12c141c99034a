"""Operations of real Horovod between real processes; trainings: see test_rules_on_cluster.py."""

import numpy as np
import pytest

from tests.lib.cluster_of_processes import run_all_well
from tests.lib.horovod_here import needs_horovod

pytestmark = needs_horovod


@pytest.mark.nightly_cases("TF_CONFIG-*", "horovod-3")
@pytest.mark.parametrize(("start", "size"), [("horovod", 2), ("TF_CONFIG", 12), ("horovod", 3)])
def test_operations(tmp_path, start, size):
    outs = [tmp_path / f"{rank}.npz" for rank in range(size)]
    moved = ["float32", "float16", "int64"]
    if start == "horovod":
        moved += ["int8", "uint8", "uint32"]
    sent = ["bfloat16", "int8", "uint8", "int16", "uint16", "uint32", "uint64"]
    options = [{"out": str(out), "moved": moved, "sent": sent} for out in outs]
    run_all_well("operate.py", options, start=start)
    all_ranks = sum(range(1, size + 1))
    for rank, out in enumerate(outs):
        found = dict(np.load(out))
        assert found.pop("scatters_well") == (start == "TF_CONFIG" and size == 2)  # not Gloo
        assert found.pop("more_threads") < 20  # of 50 exchanges
        loop = 0
        for _ in range(3):
            loop += size * loop + all_ranks
        assert found.pop("loop") == [loop]
        waited = [found.pop(f"waited/{number}") for number in range(2)]
        if rank == 0:
            assert min(waited) > 1.0  # for worker 1, which comes four seconds later
        gathered = {k: found.pop(k) for k in list(found) if k.startswith("gathered/")}
        rows = [np.arange(3 * r).reshape(3, r) % 2 + r for r in range(size)]
        for dtype in ("float32", "bfloat16", "int8", "int64"):
            np.testing.assert_array_equal(gathered[f"gathered/{dtype}"], np.concatenate(rows, 1))
        assert gathered["gathered/bool"].all()
        assert "worker 1: float32 [4]" in str(gathered["gathered/shape"])
        assert "string cannot be gathered" in str(gathered["gathered/string"])
        for key, value in found.items():
            operation, dtype, *_, number = key.split("/")
            if operation in ("all_reduce", "reduce_scatter"):
                expected = all_ranks * np.arange(1, 1 + size * (6, 2)[int(number)])
                if operation == "reduce_scatter":
                    expected = np.split(expected, size)[rank]
            elif operation == "all_to_all":
                mine = np.split(np.arange(1, 1 + size * 6), size)[rank]
                expected = np.multiply.outer(np.arange(1, size + 1), mine)
            else:
                one = np.arange(1, 1 + value.size // (size if operation == "all_gather" else 1))
                expected = np.multiply.outer(np.arange(1, size + 1), one)
                expected = expected if operation == "all_gather" else one
            assert value.dtype == ("float32" if dtype == "bfloat16" else dtype)
            np.testing.assert_array_equal(value.ravel(), np.ravel(expected), err_msg=key)

"""A search by chance: random runs of the library beside NumPy written from the pages.

    python -m tests.search --cases=80 [--seed=0] [--first=0] [--devices=4]
    tfpara-launch -n 3 -- python -m tests.search --cases=20 --folder=/tmp/search

Each case draws a rule, an optimizer, periods, data and options. It is trained by the library, on
logical devices of this process or of all workers, and by tests/search/reference.py; the weights of
each replica, the global model, the averages and the last epoch's loss are compared. A line for each
case that differs, and one at the end. Exit code 1 where one differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

import tfpara
from tests.search import cases, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=80, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--devices", type=int, default=4, help="at most so many for each worker")
    parser.add_argument("--folder", type=Path, help="for checkpoints, shared by all workers")
    arguments = parser.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(arguments.devices)],
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    workers = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=1, devices=["CPU:0"]
    ).num_workers
    folder = arguments.folder or Path(tempfile.mkdtemp())
    worst, failed = 0.0, []
    for number in range(arguments.first, arguments.first + arguments.cases):
        case = cases.draw(arguments.seed, number, workers, arguments.devices)
        distances = differences(case, folder)
        name = max(distances, key=distances.get)
        limit = tolerance(case)
        worst = max(worst, distances[name] / limit)
        good = distances[name] <= limit
        print(f"case {number}: {'equal' if good else 'DIFFERS'}, {distances[name]:.1e} ({name})")
        if not good:
            failed.append(number)
            print(f"  {case}\n  {distances}")
        sys.stdout.flush()
        keras.utils.clear_session()
    numbers = f": {', '.join(map(str, failed))}" if failed else ""
    print(f"{len(failed)} of {arguments.cases} cases differ{numbers}.")
    print(f"The largest difference is {worst:.2f} of what rounding allows.")
    sys.exit(bool(failed))


def tolerance(case: reference.Case) -> float:
    """The largest difference that rounding to float32, or to 16 bits on the wire, may make."""
    return {"none": 3e-5, "bf16": 1e-2, "fp16": 2e-3}[case.compression]


def differences(
    case: reference.Case, folder: Path, expected_of: reference.Case | None = None
) -> dict[str, float]:
    """Returns the largest difference of each thing that is compared.

    expected_of: another case to compare with, which shows that the search finds a difference.
    """
    initial, got, replicas = cases.trained(case, folder)
    want = reference.expected(expected_of or case, initial, cases.FORMATS)
    found = {
        f"replica {replica}": abs(got.local[k] - want.local[replica]).max()
        for k, replica in enumerate(replicas)
    }
    found |= {name: abs(got.averages[name] - want.averages[name]).max() for name in want.averages}
    found["loss"] = abs(got.loss - want.loss) / abs(want.loss)
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    tfpara.run(main)

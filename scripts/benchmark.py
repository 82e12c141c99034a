"""The former name of `scripts.benchmarks`, for one release."""

import runpy
import sys

if __name__ == "__main__":
    print("scripts.benchmark is scripts.benchmarks now; this name will go.", file=sys.stderr)
    runpy.run_module("scripts.benchmarks", run_name="__main__", alter_sys=True)

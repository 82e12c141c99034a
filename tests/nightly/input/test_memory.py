"""Memory to prepare a corpus does not grow with the archive: peak sizes of real processes."""

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
FRAMES, DIM = 2000, 40

# Runs the program named by the arguments, and prints the peak resident size of it alone.
MEASURE = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, *sys.argv[1:]]).returncode
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)
"""


def write_archive(directory, megabytes):
    """`feats.scp` over an archive of float matrices of `megabytes`, and gzipped alignments."""
    directory.mkdir()
    matrix = np.random.default_rng(0).standard_normal((FRAMES, DIM)).astype("<f4")
    frames = b"\0BFM " + struct.pack("<bibi", 4, FRAMES, 4, DIM) + matrix.tobytes()
    pairs = np.zeros(FRAMES, [("size", "u1"), ("value", "<i4")])
    pairs["size"], pairs["value"] = 4, np.arange(FRAMES) % 50
    labels = b"\0B\4" + struct.pack("<i", FRAMES) + pairs.tobytes()
    count = int(megabytes * 1e6 / len(frames))
    keys = [f"s{number % 10}-u{number:05d}" for number in range(count)]
    with (
        open(directory / "feats.ark", "wb") as ark,
        open(directory / "feats.scp", "w") as scp,
        gzip.open(directory / "pdf.1.gz", "wb", 1) as pdfs,
    ):
        for key in sorted(keys):
            start = f"{key} ".encode()
            scp.write(f"{key} {directory}/feats.ark:{ark.tell() + len(start)}\n")
            ark.write(start + frames)
            pdfs.write(start + labels)
    (directory / "utt2spk").write_text("".join(f"{key} {key[:2]}\n" for key in sorted(keys)))


def peak_megabytes(directory):
    """Peak resident size of `prepare_kaldi` on `directory`."""
    flags = [
        f"--data={directory}",
        f"--ali={directory}/pdf.*.gz",
        f"--out={directory}-corpus",
        "--deltas=1",
        "--shard_megabytes=16",
        "--cmvn=speaker",
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "-m", "scripts.prepare_kaldi", *flags],
        cwd=ROOT,
        env=os.environ | {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    word, peak, code = done.stdout.splitlines()[-1].split()
    assert (word, code) == ("peak", "0"), done.stderr
    return int(peak) * 1024 / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count peak sizes otherwise")
def test_an_archive_of_four_times_the_size_takes_no_more_memory(tmp_path):
    write_archive(tmp_path / "once", 25)
    write_archive(tmp_path / "more", 100)
    once, more = peak_megabytes(tmp_path / "once"), peak_megabytes(tmp_path / "more")
    # The larger is 75 MB larger (150 MB as a corpus): 20 MB are what allocators differ by.
    assert more < once + 20, f"{once:.0f} MB for 25 MB, {more:.0f} MB for 100 MB"

"""A process that the launcher starts; the chief prints where all processes and the launcher listen.

Then the chief acts as a stranger: it sends bytes that are no message to each of these ports and
keeps the connections open, while all go on training.

Argument: "ps" for asynchronous training. The line that begins with "{" is JSON: for each process,
by name (its task, or "launcher"), its listening addresses, whether it has the chief's
TFPARA_SECRET, and whether that secret is among its arguments.
"""

import contextlib
import functools
import json
import os
import socket
import struct
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfpara


def listening():
    """Returns "address port" of all listening sockets by their inode, from a table of Linux."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, port = words[1].split(":")
                parts = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                host = socket.inet_ntop(family, struct.pack(f"={len(parts)}I", *parts))
                found[f"socket:[{words[9]}]"] = f"{host} {int(port, 16)}"
    return found


def look():
    table, launcher, found = listening(), os.getppid(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != launcher and int(process.name) != launcher:
                continue
            environ = dict(
                each.partition("=")[::2] for each in (process / "environ").read_text().split("\0")
            )
            place = environ.get("TF_CONFIG") or environ.get("HOROVOD_RANK")
            if int(process.name) != launcher and not place:
                continue  # This process is the launcher's guardian.
            name = "launcher" if int(process.name) == launcher else str(json.loads(place))
            name = str(json.loads(place)["task"]) if name.startswith("{") else name
            links = set()
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    links.add(os.readlink(link))
            found[name] = {
                "places": sorted(table[link] for link in links if link in table),
                "has secret": environ.get("TFPARA_SECRET") == os.environ["TFPARA_SECRET"],
                "shows secret": os.environ["TFPARA_SECRET"] in (process / "cmdline").read_text(),
            }
    print(json.dumps(found), flush=True)
    places = {place for each in found.values() for place in each["places"]}
    return [attack(place.split()[1], text) for place in places for text in STRANGE]


def attack(port, text):
    stranger = socket.create_connection(("127.0.0.1", int(port)), 10.0)
    with contextlib.suppress(OSError):  # cut off
        stranger.sendall(text)
    return stranger


STRANGE = (b"", b"GET / HTTP/1.0\r\n\r\n", b"[]\n{}\n", b"x" * (1 << 20), bytes(1 << 10))
asynchronous = sys.argv[1:] == ["ps"]
if asynchronous:
    strategy = tfpara.AsyncStrategy(tfpara.ASGD())
else:
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((np.ones((2, 2)), np.ones((2, 1)))).repeat(8)
fit = functools.partial(strategy.fit, model) if asynchronous else model.fit
fit(data, verbose=0)
strangers = look() if asynchronous or strategy.is_chief else []
fit(data, verbose=0)  # the others wait for the chief

"""Mutants of files: bytes and JSON that damage, or a hostile writer, may leave; from a seed."""

import copy
import json
import os
import random
import re

_MANY = int(os.environ.get("TFPARA_MUTANTS", "0"))

# Values that readers are seldom written for, of every type and size that JSON has.
HOSTILE = (
    *(None, True, 0, -1, 2.5, 1e308, 10**9, 2**63, 10**30, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "../x", "/dev/zero", "9" * 400),
    *([], [[]], [1, 2], ["x"], [[[0], 1, 10**9]], {}, {"x": 1}, [None] * 100),
)


# Words that readers of text are seldom written for.
WORDS = (
    *("", "0", "-1", "1.5", "nan", "1e999", "2147483648", "18446744073709551616", "9" * 5000),
    *("x" * 5000, "a\0b", "[", "]", "{}", "null", "true", "é", "\u0663", "../x", "-", "|", ","),
    *("/dev/null/x", "x:99999999999999999999", "[0:99999999999999999999]", "[0-999999999]", "::1"),
    *("rm x |", "$(touch x)", "127.0.0.1:70000", "[::1]:1", "--flagfile=x", "\ud800", "\x1b[31m"),
)


def count(daily):
    """Returns how many mutants a test makes: `daily` for each change, or TFPARA_MUTANTS."""
    return _MANY or daily


def of_text(content, seed, count):
    """Yields `count` mutants of a text: one to three of its words are others, twice or left out."""
    rng = random.Random(seed)
    for _ in range(count):
        found = content
        for _ in range(rng.randrange(1, 4)):
            words = list(re.finditer(r"[^\s,:\"\[\]{}=-]+", found)) or [re.match("", found)]
            word = rng.choice(words)
            new = rng.choice((rng.choice(WORDS), word[0] * 2, word[0][:-1], word[0] + "9"))
            found = found[: word.start()] + new + found[word.end() :]
        yield found


def of_bytes(content, seed, count):
    """Yields `count` mutants of some bytes: bits flipped, parts cut out, doubled, written over."""
    rng = random.Random(seed)
    for _ in range(count):
        found = bytearray(content)
        at = rng.randrange(len(found))
        to = min(len(found), at + 1 + rng.randrange(20))
        kind = rng.choice(("flip", "flip", "digit", "cut", "out", "twice", "noise", "deep"))
        if kind == "flip":
            found[at] ^= 1 << rng.randrange(8)
        elif kind == "digit":  # what stays JSON and says something else
            digits = [k for k, byte in enumerate(found) if 48 <= byte < 58] or [at]
            found[rng.choice(digits)] = rng.randrange(48, 58)
        elif kind == "cut":
            del found[at:]
        elif kind == "out":
            del found[at:to]
        elif kind == "twice":
            found[at:at] = found[at:to]
        elif kind == "noise":
            found[at:to] = rng.randbytes(to - at)
        else:
            found[at:at] = rng.choice((b"[", b'{"a":')) * 200_000
        yield bytes(found)


def of_json(content, seed, count):
    """Yields `count` mutants of a JSON value: a part is replaced, left out, renamed or nested."""
    rng = random.Random(seed)
    for _ in range(count):
        found = copy.deepcopy(content)
        parents = list(_parents(found))
        parent = rng.choice(parents)
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        kind = rng.choice(("value", "value", "value", "out", "name", "more"))
        if kind == "out":
            del parent[key]
        elif kind == "name" and isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        elif kind == "more" and isinstance(parent[key], int):
            parent[key] += rng.choice((1, 8, -1))
        else:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
        yield found


def text(content):
    """Returns a mutant's JSON as bytes."""
    return json.dumps(content).encode()


def _parents(value):
    """Yields the dicts and lists within a value that have entries."""
    if isinstance(value, dict | list) and value:
        yield value
        for entry in list(value.values()) if isinstance(value, dict) else value:
            yield from _parents(entry)

"""Requests to the live page of a run, for tests."""

import json
import re
import time
import urllib.request

import pytest

from tests.lib.launched import DEADLINE


def ask(url, path):
    with urllib.request.urlopen(url.replace("/?", f"/{path}?"), timeout=DEADLINE) as answer:
        return answer.read().decode()


def until(url, holds):
    """Returns the first status for which a condition holds."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        status = json.loads(ask(url, "status.json"))
        if holds(status):
            return status
        time.sleep(0.2)
    pytest.fail(f"it never holds: {status}")


def url_of(log, prefix):
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        found = re.search(
            rf"^{prefix}: live page: (http://127\.0\.0\.1:\d+/\?token=\w+)$", log(), re.M
        )
        if found:
            return found[1]
        time.sleep(0.1)
    pytest.fail(f"no page of {prefix}: {log()}")

"""Settings of Horovod that joining its group makes; the rest: see tests/distributed."""

import os
import types

import pytest

from tfpara.cluster import Cluster
from tfpara.sync.workers import horovod_group

DEFAULTS = {
    "HOROVOD_CYCLE_TIME": "5",
    "HOROVOD_FUSION_THRESHOLD": "0",
    "HOROVOD_GLOO_IFACE": "lo",  # which has the address of TF_CONFIG
}


@pytest.mark.parametrize("of_the_user", [{}, *({name: "7"} for name in DEFAULTS)])
def test_what_the_user_sets_is_kept(monkeypatch, of_the_user):
    found = Cluster(("127.0.0.1:1", "b:1"), "chief", 0, has_chief_job=True)
    seen = {}
    loaded = types.SimpleNamespace(
        init=lambda: seen.update({name: os.environ[name] for name in DEFAULTS}),
        rank=lambda: 0,
        size=lambda: 2,
    )
    monkeypatch.setattr(horovod_group, "load", lambda: loaded)
    monkeypatch.setattr(horovod_group, "_meet", lambda *_: object())
    monkeypatch.setattr(horovod_group, "_joined", None)
    monkeypatch.setattr(horovod_group.atexit, "register", lambda _: None)
    for name in [*DEFAULTS, "HOROVOD_GLOO_TIMEOUT_SECONDS"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in of_the_user.items():
        monkeypatch.setenv(name, value)
    horovod_group.join(found, 1.0, 1.0)
    assert seen == DEFAULTS | of_the_user

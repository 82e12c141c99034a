"""Settings of TensorFlow and gRPC for runs whose members change."""

import os
import types

import pytest
import tensorflow as tf

from tfpara.sync.tensorflow import links

pytestmark = pytest.mark.latest

OFF = {"disable_meta_optimizer": True}


@pytest.mark.parametrize(
    ("devices", "chosen", "becomes"),
    [
        (["CPU:0", "/device:cpu:1"], {}, OFF),
        (["CPU:0"], {"constant_folding": True}, {}),
        (["GPU:0"], {}, {}),
    ],
)
def test_graphs_are_optimised_on_gpus_or_where_the_program_chooses(
    devices, chosen, becomes, monkeypatch
):
    options = dict.fromkeys(links.NO_PARTS, False) | chosen
    told = {}
    stand_in = types.SimpleNamespace(
        get_experimental_options=lambda: options, set_experimental_options=told.update
    )
    monkeypatch.setattr(tf.config, "optimizer", stand_in)
    monkeypatch.setattr(os, "environ", {})
    links.prepare_for_changes(devices)
    assert told == becomes


@pytest.mark.parametrize(("given", "becomes"), [(None, "epoll1,poll"), ("poll", "poll")])
def test_grpc_is_told_unless_the_user_has_chosen(given, becomes, monkeypatch):
    environment = {} if given is None else {"GRPC_POLL_STRATEGY": given}
    monkeypatch.setattr(os, "environ", environment)
    links.prepare_for_changes(["GPU:0"])
    assert environment == {"GRPC_POLL_STRATEGY": becomes}

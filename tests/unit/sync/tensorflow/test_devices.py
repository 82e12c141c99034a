"""The devices of a process, with made-up lists of devices and a made-up driver."""

import ctypes
import types

import pytest
import tensorflow as tf

from tfpara.sync.tensorflow import devices

pytestmark = pytest.mark.latest

# As TensorFlow lists them on each of two workers, of which the second has a GPU more.
TWO_WORKERS = [
    "/job:worker/replica:0/task:0/device:CPU:0",
    "/job:worker/replica:0/task:0/device:GPU:0",
    "/job:worker/replica:0/task:1/device:CPU:0",
    "/job:worker/replica:0/task:1/device:GPU:0",
    "/job:worker/replica:0/task:1/device:GPU:1",
    "/job:worker/replica:0/task:10/device:CPU:0",
]


def test_devices_of_other_processes_are_not_this_ones():
    worker = "/job:worker/task:0"
    found = devices.checked_devices(["gpu:0"], TWO_WORKERS, worker)
    assert found == ["/job:worker/task:0/device:GPU:0"]
    has = r"devices=\['GPU:0', 'GPU:1'\]: this process has \['CPU:0', 'GPU:0'\]\."
    with pytest.raises(ValueError, match=has):
        devices.checked_devices(["GPU:0", "GPU:1"], TWO_WORKERS, worker)
    with pytest.raises(ValueError, match=r"this process has \['CPU:0'\]"):
        devices.checked_devices(["GPU:0"], TWO_WORKERS, "/job:worker/task:10")
    both = devices.checked_devices(["GPU:0", "GPU:1"], TWO_WORKERS, "/job:worker/task:1")
    assert both == [f"/job:worker/task:1/device:GPU:{number}" for number in range(2)]
    alone = ["/job:localhost/replica:0/task:0/device:CPU:0"]
    assert devices.checked_devices(["CPU:0"], alone, "") == ["/device:CPU:0"]
    with pytest.raises(ValueError, match=r"devices=\[\]"):
        devices.checked_devices([], alone, "")


def make_gpus(monkeypatch, visible, divided=()):
    """Makes up cards that this process sees, by number; those of `divided` are two devices."""
    cards = [types.SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in visible]
    two = {cards[visible.index(number)].name: ["", ""] for number in divided}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: cards)
    of = lambda card: two.get(card.name)  # noqa: E731
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", of)


def test_all_gpus_are_the_default_or_else_a_cpu(monkeypatch):
    make_gpus(monkeypatch, [])
    assert devices.default_devices() == ["CPU:0"]  # of the four that the tests have
    make_gpus(monkeypatch, [0, 1])
    assert devices.default_devices() == ["GPU:0", "GPU:1"]
    make_gpus(monkeypatch, [1, 3], divided=[1])  # the others are hidden from TensorFlow
    assert devices.default_devices() == ["GPU:0", "GPU:1", "GPU:2"]
    assert devices.cards_of_gpus() == [1, 1, 3]


@pytest.mark.parametrize("given", ["CPU:0", 2, [types.SimpleNamespace(name="/device:CPU:0")]])
def test_what_is_no_list_of_names_is_refused(given):
    with pytest.raises(TypeError, match=r"^devices=.* must be a list of names, such as \["):
        devices.named_devices(given)


class Driver:
    """CUDA's driver on a machine of four cards, whose identifiers are their numbers."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = 100 + number
        return 0 if number < 4 else 101  # invalid

    def cuDeviceGetUuid(self, uuid, device):
        uuid._obj[15] = device.value - 100
        return 0


def test_a_card_is_known_by_what_the_driver_says(monkeypatch):
    make_gpus(monkeypatch, [1, 3, 7])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    first, second, third = (devices.card_of(f"/job:a/task:0/device:GPU:{k}") for k in range(3))
    assert (first, second) == ("0" * 31 + "1", "0" * 31 + "3")
    assert third is None  # the driver has no such card

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert devices.card_of("/device:GPU:0") is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # too old a driver
    assert devices.card_of("/device:GPU:0") is None

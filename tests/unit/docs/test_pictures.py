"""The pictures of docs/pictures are what the code draws, and can be read."""

import importlib.metadata
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from tfpara import BMUF, BSP, EASGD

matplotlib = pytest.importorskip("matplotlib")
from scripts.docs import charts, pictures

ROOT = Path(__file__).resolve().parents[3]
PIN = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints" / "full.txt").read_text(), re.M)[1]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_checked_in_pictures_are_what_the_code_draws(name, tmp_path):
    drawn = pictures.draw(name, tmp_path).read_text()
    if importlib.metadata.version("matplotlib") != PIN:
        pytest.skip(f"another Matplotlib than {PIN} draws other files")
    fix = f"python -m scripts.docs.pictures {name}"
    assert drawn == (pictures.FOLDER / f"{name}.svg").read_text(), f"draw it again: {fix}"


@pytest.mark.parametrize("path", sorted(pictures.FOLDER.iterdir()), ids=lambda path: path.name)
def test_text_is_large_enough_where_a_picture_is_as_wide_as_a_page(path):
    assert path.stem in pictures.PICTURES
    root = ElementTree.fromstring(path.read_text())
    width = float(root.get("viewBox").split()[2])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", path.read_text())]
    assert min(sizes) * 690 / width >= 11
    pages = (ROOT / "docs").rglob("*.md")
    assert any(f"pictures/{path.name})" in page.read_text() for page in pages)


def test_paths_of_rules_by_hand():
    """One block from 0: replica i is at (1 − (1 − rate·h)^4) best_i."""
    best = np.array([[2.6, 0.4], [1.0, 2.4]])
    ends = best * (1 - (1 - 0.14 * np.array([1.0, 0.35])) ** 4)
    (bsp,) = pictures.lives(BSP(), blocks=1)
    np.testing.assert_allclose([path[-1] for path in bsp["paths"]], ends)
    np.testing.assert_allclose(bsp["next"], [ends.mean(0)] * 2)
    (bmuf,) = pictures.lives(BMUF(0.5), blocks=1)
    np.testing.assert_allclose(bmuf["global"], ends.mean(0))
    np.testing.assert_allclose(bmuf["next"], [1.5 * ends.mean(0)] * 2)
    (easgd,) = pictures.lives(EASGD(0.25), blocks=1)
    np.testing.assert_allclose(easgd["global"], 0.25 * ends.sum(0))
    np.testing.assert_allclose(easgd["next"], 0.75 * ends)


def test_figures_are_those_of_the_pages():
    assert charts.errors()[16] == [(5, 35.51, 0.19), (20, 36.04, 0.36), (80, 38.34, 0.21)]
    assert charts.speeds()["tfpara, period 80, overlap"] == [(1000.0, 4091.0), (100.0, 4005.0)]
    assert charts.times()["speech"]["BMUF()", "1 Gbit/s"] == {4: 2.9, 8: 5.6}
    assert charts.times()["digits"]["all-reduce", "10 Gbit/s"] == {4: 3.2, 8: 5.5}
    assert not any(charts.times()["characters"].values())
    assert charts.syncs()["100 Mbit/s"]["two levels"] == {4: 1.03, 8: 1.03, 16: 1.04}


def test_unknown_picture_is_refused(capsys):
    assert pictures.main(["nothing"]) == 2
    assert "no picture nothing: there are block, batch" in capsys.readouterr().err

"""Tables and a plot of the suite `peers` in the documentation.

    python -m scripts.benchmarks.page --results=FILE.json --page=docs/benchmarks.md

replaces the text between the page's two marks, and writes the plot beside the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import flags

from scripts import common
from scripts.benchmarks.headlines import headlines

_RESULTS = flags.DEFINE_string("results", None, "JSON file of --suite=peers", required=True)
_PAGE = flags.DEFINE_string("page", "docs/benchmarks.md", "Markdown page with the two marks")
BEGIN = "<!-- peers: written by scripts.benchmarks.page -->"
END = "<!-- end of peers -->"
_PLOT = "peers.svg"
_SPEED = "samples_per_second"


def main() -> None:
    """Writes the page and the plot."""
    results = Path(_RESULTS.value)
    if not results.is_file():
        raise common.Failure(
            f"--results={results} does not exist. python -m scripts.benchmarks --suite=peers "
            f"--out={results} makes it."
        )
    content = json.loads(results.read_text())
    if content.get("suite") != "peers":
        raise common.Failure(
            f"--results={results} is of the suite {content.get('suite')!r}; only those of the "
            "suite 'peers' are written into a page."
        )
    page = Path(_PAGE.value)
    text = page.read_text() if page.is_file() else ""
    if BEGIN not in text or END not in text.split(BEGIN, 1)[1]:
        raise common.Failure(f"--page={page} lacks the lines {BEGIN!r} and {END!r}. Write them.")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    draw(content, page.parent / _PLOT)
    common.write_text(page, f"{before}{BEGIN}\n{section(content)}{END}{after}")
    print(f"{page} and {page.parent / _PLOT} are written.")


def section(content: dict[str, Any]) -> str:
    """Returns the part between the marks, in Markdown."""
    trained = [row for row in content["rows"] if _SPEED in row]
    exchanged = [row for row in content["rows"] if row not in trained and "sync_ms" in row]
    columns = {
        "workers": lambda r: r["workers"],
        "samples/s": lambda r: _ranged(r, _SPEED, ".0f"),
        "speed / one worker": lambda r: _shown(r, "scaling", ".2f"),
        "speed / two independent": lambda r: _shown(r, "ratio_to_independent", ".2f"),
        "sync ms": lambda r: _shown(r, "sync_ms", ".0f"),
        "bytes sent a sample": lambda r: _shown(r, "bytes_per_sample", ",.0f"),
        "peak memory MB": lambda r: _shown(r, "peak_memory_bytes", ",.0f", 1e-6),
    }
    parts = [
        _conditions(content),
        f"![samples per second of all systems]({_PLOT})",
        "\n".join(f"* {sentence}" for sentence in headlines(content["rows"], syncs=False)),
        _table([row for row in trained if row["link"] == "loopback"], columns),
        _by_link(
            "The next table has the time of a whole sync of the weights, and of a bare exchange of "
            "the same number of bytes, in ms",
            exchanged,
            "sync_ms",
        ),
        _by_link(
            "The next table has the samples/s of two workers, on loopback and on limited links",
            _limited(trained),
            _SPEED,
        ),
        _predicted(content["predictions"]),
        _absent(content["rows"]),
        " ".join(f"{note}." for note in content["notes"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(content: dict[str, Any]) -> str:
    machine = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    sizes = content["sizes"]
    return (
        f"The machine had {machine['cores']} cores ({machine['cpu']}, {machine['system']}). The "
        f"versions were {versions}. The network was {sizes['inputs']}-{sizes['layers']}x"
        f"{sizes['width']}-{sizes['classes']}. Minibatches had {sizes['batch']} samples, and each "
        f"worker had one thread. Figures on loopback are medians of {content['rounds']} rounds, "
        "with the smallest and the largest value in brackets."
    )


def _limited(trained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the systems that were measured on a limited link, too."""
    limited = {row["system"] for row in trained if row["link"] != "loopback"}
    return [row for row in trained if row["system"] in limited]


def _by_link(title: str, rows: list[dict[str, Any]], key: str) -> str:
    """Returns a table of one figure of every system, with a column for each link."""
    by_system: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_system.setdefault(row["system"], {"system": row["system"]})[row["link"]] = row

    def cell(link: str) -> Any:
        return lambda found: _ranged(found[link], key, ".0f") if link in found else ""

    columns = {link: cell(link) for link in dict.fromkeys(row["link"] for row in rows)}
    table = _table(list(by_system.values()), columns)
    return f"{title}:\n\n{table}" if table else ""


def _predicted(predictions: list[dict[str, Any]]) -> str:
    if not predictions:
        return ""
    columns = {
        "link": lambda r: r["link"],
        "predicted samples/s": lambda r: _shown(r, "predicted_samples_per_second", ".0f"),
        "measured": lambda r: _shown(r, _SPEED, ".0f"),
        "measured / predicted": lambda r: _shown(r, "measured_over_predicted", ".2f"),
    }
    title = (
        "The next table has the speeds of two workers, as predicted by the cost model "
        "(`tfpara.planner`) and as measured:"
    )
    return f"{title}\n\n{_table(predictions, columns)}"


def _absent(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"* {row['system']} ({row['link']}): {row.get('missing') or 'failed: ' + row['failed']}"
        for row in rows
        if "missing" in row or "failed" in row
    ]
    return "\n".join(["These systems were left out or failed:", "", *lines]) if lines else ""


def _table(rows: list[dict[str, Any]], columns: dict[str, Any]) -> str:
    if not rows:
        return ""
    lines = [["system", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row["system"], *(str(cell(row)) for cell in columns.values())] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(row: dict[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    return format(row[key] * scale, form) if key in row else ""


def _ranged(row: dict[str, Any], key: str, form: str) -> str:
    low, high = row[f"{key}_range"]
    spread = f" ({low:{form}} – {high:{form}})" if low != high else ""
    return f"{row[key]:{form}}{spread}"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draws bars of the speed of two workers, with one panel for each link."""
    pyplot = common.pyplot("svg")
    rows = [r for r in content["rows"] if r["workers"] == 2 and _SPEED in r]
    links = list(dict.fromkeys(r["link"] for r in rows))
    names = list(dict.fromkeys(r["system"] for r in rows))
    colours = {"tfpara": "tab:blue", "peer": "tab:orange", "reference": "tab:grey"}
    figure, panels = pyplot.subplots(
        1,
        max(1, len(links)),
        sharey=True,
        squeeze=False,
        figsize=(3 + 4 * max(1, len(links)), 1.5 + 0.28 * len(names)),
    )
    for panel, link in zip(panels[0], links, strict=False):
        here = [r for r in rows if r["link"] == link]
        places = [names.index(r["system"]) for r in here]
        panel.barh(
            places,
            [r[_SPEED] for r in here],
            color=[colours[r["family"]] for r in here],
        )
        panel.set_title(link)
        panel.set_xlabel("samples/s, two workers")
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    common.run(main)

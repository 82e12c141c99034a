"""The status of a run as JSON, as text for Prometheus, and as a page.

The text of the page is constant. Its script fetches the JSON, and shows the values as plain text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

# For each metric: its name, kind and description for Prometheus, and its key in a worker's row.
_OF_WORKER = (
    ("tfpara_up", "gauge", "whether the process runs", "runs"),
    ("tfpara_starts_total", "counter", "starts of the process", "starts"),
    ("tfpara_steps_total", "counter", "minibatches of each of its replicas", "steps"),
    ("tfpara_samples_total", "counter", "samples of its replicas", "samples"),
    ("tfpara_syncs_total", "counter", "committed syncs", "syncs"),
    ("tfpara_sync_seconds_total", "counter", "time for which training stood still", "sync_seconds"),
    ("tfpara_wait_seconds_total", "counter", "the part of it that was waiting", "wait_seconds"),
    ("tfpara_sent_bytes_total", "counter", "bytes sent in syncs", "bytes_sent"),
    ("tfpara_left_out_total", "counter", "minibatches with NaN or Inf", "left_out"),
    ("tfpara_samples_per_second", "gauge", "speed of late", "samples_per_second"),
    ("tfpara_wait_share", "gauge", "share of the time spent waiting, of late", "wait_share"),
    ("tfpara_waiting_seconds", "gauge", "length of the present wait", "waiting_seconds"),
    ("tfpara_last_sync_seconds", "gauge", "time since the last sync", "last_sync_seconds"),
    ("tfpara_distance", "gauge", "relative distance of the replicas before a sync", "distance"),
)

_SCRIPT = """
const cell = (row, tag, text) => row.appendChild(document.createElement(tag)).textContent = text;
const number = (value, digits) => typeof value !== "number" ? (value ?? "–")
  : value.toLocaleString("en", {maximumFractionDigits: digits});
const brief = (value, digits) => typeof value === "number" ? +value.toPrecision(digits)
  : value ?? "–";
const share = value => value === undefined ? "–" : number(100 * value, 1) + " %";
const fill = (id, rows) => {
  const body = document.createElement("tbody");
  for (const each of rows) {
    const row = body.insertRow();
    each.forEach((text, at) => cell(row, "td", text));
  }
  document.getElementById(id).tBodies[0].replaceWith(body);
};
const tell = (id, text) => document.getElementById(id).textContent = text;
async function show() {
  try {
    const answer = await fetch("status.json" + location.search);
    if (!answer.ok) throw new Error(await answer.text());
    const run = await answer.json();
    const there = run.workers.filter(each => each.runs).length;
    tell("head", `${there} of ${run.workers.length} processes run; ${number(run.seconds, 0)} s; `
      + `${number(run.samples_per_second, 0)} samples/s`);
    tell("waits", run.waits_for.length ? `All wait for ${run.waits_for.join(", ")}.` : "");
    tell("shows", `This page shows ${run.shows}.`);
    fill("workers", run.workers.map(each => [each.name, each.state, (each.devices ?? []).join(", "),
      each.place ?? "", number(each.steps, 0), number(each.samples_per_second, 0),
      number(each.syncs, 0), typeof each.last_sync_seconds === "number"
      ? number(each.last_sync_seconds, 0) + " s ago" : "–", share(each.wait_share),
      brief(each.distance, 3), number(each.starts, 0)]));
    fill("scores", Object.entries(run.scores).flatMap(([name, scores]) =>
      Object.entries(scores).map(([score, value]) => [name, score, brief(value, 6)])));
    fill("events", run.events.reverse().map(each => [number(each.at, 1) + " s", each.text]));
    tell("error", "");
  } catch (error) {
    tell("error", `No answer: ${error.message}. The run may have ended.`);
  }
  setTimeout(show, 2000);
}
show();
"""

_COLUMNS = (
    *("process", "state", "devices", "place", "step", "samples/s", "syncs", "last sync"),
    *("waiting", "distance", "starts"),
)


def _table(name: str, columns: tuple[str, ...]) -> str:
    heads = "".join(f"<th>{column}</th>" for column in columns)
    return f'<table id="{name}"><thead><tr>{heads}</tr></thead><tbody></tbody></table>'


PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tfpara: a run</title>
<link rel="icon" href="data:,"><style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 80rem; padding: 1rem }}
table {{ border-collapse: collapse }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left }}
td {{ font-variant-numeric: tabular-nums }}
td:nth-child(-n+3) {{ white-space: nowrap }}
#waits, #error {{ color: #b00020; font-weight: 600 }}
#shows {{ color: #666 }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd }} }}
</style></head><body>
<h1>tfpara</h1><p id="head"></p><p id="waits"></p><p id="error"></p>
{_table("workers", _COLUMNS)}
<h2>Scores</h2>{_table("scores", ("process", "score", "value"))}
<h2>Faults and changes</h2>{_table("events", ("after", "what"))}
<p id="shows"></p>
<script>{_SCRIPT}</script></body></html>
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def as_json(status: Mapping[str, Any]) -> str:
    """Returns the status as JSON, with numbers that are not finite as texts."""
    return json.dumps(_finite(status), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def metrics(status: Mapping[str, Any]) -> str:
    """Returns the status in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []

    def family(name: str, kind: str, what: str, samples: Iterable[tuple[str, Any]]) -> None:
        lines.extend([f"# HELP {name} {what}", f"# TYPE {name} {kind}"])
        lines.extend(f"{name}{labels} {float(value)!r}" for labels, value in samples)

    workers, awaited = status["workers"], status["waits_for"]
    for name, kind, what, key in _OF_WORKER:
        values = [(_labels(worker=each["name"]), each.get(key)) for each in workers]
        family(name, kind, what, [pair for pair in values if pair[1] is not None])
    waits = [(_labels(worker=each["name"]), each["name"] in awaited) for each in workers]
    family("tfpara_awaited", "gauge", "whether others wait for the process", waits)
    scores = [
        (_labels(worker=worker, score=score), value)
        for worker, of_it in status["scores"].items()
        for score, value in of_it.items()
    ]
    family("tfpara_score", "gauge", "a score of the last epoch or checkpoint", scores)
    family("tfpara_faults_total", "counter", "processes that have failed", [("", status["faults"])])
    return "\n".join(lines) + "\n"


def _labels(**texts: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in texts.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

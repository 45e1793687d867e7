"""`python -m e2e.pictures --write`: `pd-sidecar top` and the chart's dashboard, from one run on real engines.

Some minutes of short, long and repeated prompts through a sidecar with everything on (auto, TLS, discovery, KV
events, traces), between a prefill and a decode engine; the prefill engine is killed meanwhile, and comes back.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from e2e.asking import COMPLETIONS, ask, request_body, token_ids
from e2e.engines import HOST, Engine
from e2e.pictures import panels, terminal
from e2e.rig import Rig
from tests.certificates import Authority
from tests.chart import tools
from tests.chart.prometheus import SELECT, Prometheus
from tests.chart.render import CHART
from tests.integration import collector
from tests.integration.sidecar import Sidecar, eventually
from tests.ports import free_ports

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
FIRST_ROWS = ("Does it pay?", "What is decided, and why", "What fails")
"""Of the dashboard, in the picture for readers in a hurry."""
STEP_S, RATE_INTERVAL = 2, "15s"
CLIENTS = 4
MODEL, RULE = "tiny", "static"
"""Its prompts cost so little that the cost rule would keep all of them local."""
TOP_S = 12.0
"""Its rates are those of the last ten seconds."""


class Clients:
    """Each asks, reads the whole answer, and rests a little. A failed request fails the run."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._goes_on = True
        self._earlier: list[list[int]] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while self._goes_on:
            kind = draw.random()
            if kind < 0.45:
                prompt = token_ids(draw.randrange(40, 200))
            elif kind < 0.8 or not self._earlier:
                prompt = token_ids(draw.randrange(600, 1800))
                self._earlier = [*self._earlier[-7:], prompt]
            else:
                prompt = draw.choice(self._earlier) + token_ids(60)
            body = request_body(COMPLETIONS, prompt, draw.randrange(20, 80), stream=True) | {"model": MODEL}
            answer = ask(self._sidecar, COMPLETIONS, body)
            if answer.status != 200:
                self.problems.append(f"{answer.status}: {answer.body[:200]!r}")
            time.sleep(draw.uniform(0.05, 0.5))

    def stop(self) -> None:
        self._goes_on = False
        for thread in self._threads:
            thread.join(60)


def dashboard_answers(prometheus: Prometheus, begin: float, end: float) -> dict[int, list[panels.Series]]:
    """What every panel's queries bring over that time."""
    answers = {}
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        found = answers[panel["id"]] = []
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            for variable, value in SELECT.items():
                expression = expression.replace(variable, value)
            span = {"start": f"{begin:.0f}", "end": f"{end:.0f}", "step": str(STEP_S)}
            for one in prometheus.get("query_range", query=expression, **span)["result"]:
                points = [(float(at), float(value)) for at, value in one["values"]]
                found.append(panels.Series(panels.named(target["legendFormat"], one["metric"]), points))
    return answers


def die_in_mid_prefill(prefill: Engine, sidecar: Sidecar) -> None:
    """So that what follows for the request is seen too."""

    def busy() -> float:
        return sidecar.metrics()("inflight", leg="prefill")

    while True:
        eventually(busy, 60)
        prefill.stop()
        time.sleep(0.2)
        if busy():
            prefill.kill()
            return
        prefill.cont()


def run(seconds: float) -> dict[str, str]:
    """The pictures, by file name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        events = free_ports()
        publishes = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{HOST}:{events}",
        }
        decode_flags = [f"--kv-events-config={json.dumps(publishes)}"]
        rig = stack.enter_context(Rig(MODEL, lease_seconds=10, decode_flags=decode_flags))
        prefill, decode = rig.prefill[0], rig.decode[0]
        authority = Authority()
        (folder / "prefill.txt").write_text(f"{prefill.address}\n")
        program = collector.program()
        if program is None:
            raise SystemExit("no collector for traces can be had here")
        traces = stack.enter_context(collector.running(program, folder))
        sidecar = Sidecar(
            *("--decision-rule", RULE),
            *("--discovery", f"file:{folder / 'prefill.txt'}", "--warm-up", "on"),
            *("--prefill-side-channel-port", str(prefill.side_channel_port)),
            *("--model-server-port", str(decode.port), "--kv-events", "on", "--kv-events-port", str(events)),
            *("--local-side-channel", f"{HOST}:{decode.side_channel_port}"),
            *("--secure-serving", "on", "--cert-path", str(authority.issue(HOST).write(folder / "tls"))),
            *("--tracing", "on", "--trace-sample", "0.2", "--otlp-endpoint", traces.url),
        )
        stack.callback(sidecar.kill)
        sidecar.tls = authority.client_context()
        prometheus = Prometheus(tools.debian("prometheus"), folder, f"{HOST}:{sidecar.admin_port}")
        stack.callback(prometheus.stop)
        eventually(prometheus.scraped, 30)
        clients = Clients(sidecar)
        begin = time.time()
        time.sleep(seconds * 0.4)
        die_in_mid_prefill(prefill, sidecar)
        time.sleep(seconds * 0.15)
        prefill.restart()
        time.sleep(max(begin + seconds - TOP_S - time.time(), 0))
        lines = terminal.frame(f"http://{HOST}:{sidecar.admin_port}", TOP_S)
        end = time.time()
        clients.stop()
        if clients.problems:
            raise SystemExit("requests failed: " + "; ".join(clients.problems[:3]))
        dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
        answers = dashboard_answers(prometheus, begin, end)
        return {
            "top.svg": terminal.picture(lines, "pd-sidecar top"),
            "dashboard.svg": panels.picture(dashboard, answers, (begin, end)),
            "dashboard-short.svg": panels.picture(dashboard, answers, (begin, end), FIRST_ROWS),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of load (default: %(default)g)")
    parser.add_argument("--write", action="store_true", help="into docs/pictures; by default into build/pictures")
    options = parser.parse_args()
    folder = FOLDER if options.write else FOLDER.parents[1] / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in run(options.seconds).items():
        (folder / name).write_text(svg, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

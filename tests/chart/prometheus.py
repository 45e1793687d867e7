"""A real Prometheus beside one sidecar."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.chart.render import CHART
from tests.ports import free_ports

RULES = CHART / "files" / "rules.yaml"
SELECT = {"$namespace": "space", "$pod": "decode-0"}
"""The dashboard's variables, as Grafana would put them in."""


class Prometheus:
    """Scrapes one address every half a second, as the chart's PodMonitor would: with namespace and pod."""

    def __init__(self, program: str, folder: Path, target: str) -> None:
        self.port = free_ports()
        labels = {"namespace": "space", "pod": "decode-0"}
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "sidecar", "static_configs": [{"targets": [target], "labels": labels}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [program, f"--config.file={folder}/prometheus.yml", "--log.level=error"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{self.port}"]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def scraped(self) -> bool:
        try:
            return bool(self.query("count_over_time(pd_sidecar_build_info[1m]) > 2"))
        except OSError:
            assert self._process.poll() is None, Path(self._log.name).read_text()
            return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

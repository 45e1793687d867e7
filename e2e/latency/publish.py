"""How a run on real engines ends: report, samples and plots in a folder, or one line that says why not. It must not
know what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.bench.proxies import NotReadyError
from e2e.engines import RigError
from e2e.install import InstallError
from e2e.latency.driver import LoadError
from e2e.models import ModelError

Document = dict[str, Any]


def publish(
    name: str,
    folder: Path,
    measure: Callable[[], Document],
    source: Path | None,
    plots: Callable[[Document], dict[str, str]],
    markdown: Callable[[Document, list[str]], str],
    say: Callable[[str], None],
) -> int:
    """Writes NAME.md, NAME.json and the plots; returns the exit code. `source`: samples of an earlier run, of which
    the report is made anew."""
    try:
        document = json.loads(source.read_text()) if source else measure()
    except (InstallError, ModelError, RigError, NotReadyError, LoadError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:  # everything that was started has been ended on the way here
        return 130
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots(document)
    text = markdown(document, list(drawn))
    for file, svg in drawn.items():
        (folder / file).write_text(svg)
    (folder / f"{name}.md").write_text(text)
    (folder / f"{name}.json").write_text(compact(document))
    print(text)
    say(f"report, samples and plots in {folder}")
    return 0


def compact(document: dict[str, Any]) -> str:
    """JSON with one line for each request: readable in a diff, and not a line for each token."""
    requests: list[str] = []

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            if "token_ms" in value:
                requests.append(json.dumps(value, ensure_ascii=False))
                return f"@@{len(requests) - 1}@@"
            return {key: shortened(inner) for key, inner in value.items()}
        return [shortened(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(shortened(document), indent=1, ensure_ascii=False)
    for number, line in enumerate(requests):
        text = text.replace(f'"@@{number}@@"', line, 1)
    return text + "\n"

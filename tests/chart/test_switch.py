"""The switch as a cluster turns it: a real sidecar that runs with the rendered arguments.

The rendered ConfigMap lies in a folder that is renewed as the kubelet does it.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.chart.render import one, sidecars, validated, with_values
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Sidecar, eventually


class ConfigMapVolume:
    """A folder as the kubelet makes it of a ConfigMap: files are links through `..data`, a link to a folder of one
    version; renewing writes a new folder, swaps that link in one rename, and removes the old folder."""

    def __init__(self, folder: Path, data: dict[str, str]) -> None:
        self.folder = folder
        self._version = 0
        self._data = folder / "..data"
        self._write(data)
        for name in data:
            (folder / name).symlink_to(Path("..data") / name)

    def _write(self, data: dict[str, str]) -> None:
        self._version += 1
        version = self.folder / f"..2026_11_29_{self._version}"
        version.mkdir()
        for name, text in data.items():
            (version / name).write_text(text)
        old = self._data.resolve() if self._data.exists() else None
        temporary = self.folder / "..data_tmp"
        temporary.symlink_to(version.name)
        temporary.rename(self._data)
        if old is not None:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()

    renew = _write


def switch_data(mode: str) -> dict[str, str]:
    data: dict[str, str] = one(with_values({"disagg": mode}), "ConfigMap", "switch")["data"]
    return data


@pytest.fixture
def engine() -> Iterator[ThreadedEngine]:
    with ThreadedEngine() as engine:
        yield engine


@pytest.fixture
def volume(tmp_path: Path) -> ConfigMapVolume:
    return ConfigMapVolume(tmp_path, switch_data("auto"))


@pytest.fixture
def sidecar(engine: ThreadedEngine, volume: ConfigMapVolume) -> Iterator[Sidecar]:
    """With the arguments that the chart renders, but for the ports and the folder of the volume."""
    moved = ("--port", "--metrics-port", "--model-server-port", "--prefill-side-channel-port")
    arguments = [
        argument.replace("/etc/pd-sidecar", str(volume.folder))
        for argument in sidecars(with_values({"sidecar.settings.discovery": "none"}))[0]["args"][1:]
        if argument.partition("=")[0] not in moved
    ]
    process = Sidecar(*arguments, "--model-server-port", str(engine.port))
    try:
        yield process
        process.stop()
    finally:
        process.kill()


def mode(sidecar: Sidecar) -> str:
    return sidecar.admin("GET", "/disagg")[1].strip()


def test_a_renewed_config_map_turns_the_switch(sidecar: Sidecar, volume: ConfigMapVolume) -> None:
    assert mode(sidecar) == "auto"
    for wanted in ("off", "on", "auto", "off"):
        volume.renew(switch_data(wanted))
        eventually(lambda wanted=wanted: mode(sidecar) == wanted)
    assert sidecar.process.poll() is None
    validated["turns of the rendered ConfigMap seen by a real sidecar"] += 4


def test_a_mistake_in_it_turns_nothing(sidecar: Sidecar, volume: ConfigMapVolume) -> None:
    volume.renew({"sidecar.yaml": "disagg: perhaps\n"})
    eventually(lambda: "not taken over" in sidecar.log)
    assert mode(sidecar) == "auto"
    volume.renew(switch_data("on"))
    eventually(lambda: mode(sidecar) == "on")


def test_it_survives_a_restart_of_the_container(sidecar: Sidecar, volume: ConfigMapVolume) -> None:
    """What PUT /disagg said is gone with the process; what the ConfigMap says holds."""
    data = yaml.safe_load((volume.folder / "sidecar.yaml").read_text())
    assert sidecar.admin("PUT", "/disagg", "on")[0] == 200
    sidecar.signal(signal.SIGTERM)
    sidecar.exit_code()
    again = Sidecar("--config", str(volume.folder / "sidecar.yaml"), ready="/startupz")
    assert mode(again) == data["disagg"] == "auto"
    again.stop()

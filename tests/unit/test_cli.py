"""The commands, as far as they go without running anything."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sidecar import __version__, config
from sidecar.cli import main

ROOT = Path(config.__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(config.ENV_PREFIX)]:
        monkeypatch.delenv(name)


def sidecar(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *argv],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_flag() -> None:
    done = sidecar("serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for field in config.FIELDS:
        assert f"--{field.name} " in done.stdout
        assert " ".join(field.description.split())[:20] in " ".join(done.stdout.split())
    assert "--vllm-port" in done.stdout
    assert "--config FILE" in done.stdout
    assert "PD_SIDECAR_" in done.stdout


def test_check_config_prints_what_it_would_run_with() -> None:
    done = sidecar("check-config", "--prefill", "10.0.0.5:8000", PD_SIDECAR_DISAGG="off")
    assert (done.returncode, done.stderr) == (0, "")
    effective = yaml.safe_load(done.stdout)
    assert effective["prefill"] == ["10.0.0.5:8000"]
    assert effective["disagg"] == "off"
    assert set(effective) == {field.name for field in config.FIELDS}


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_mistakes_end_the_start(command: str) -> None:
    done = sidecar(command, "--port", "0", "--disagg", "maybe", PD_SIDECAR_NONSENSE="1")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("pd-sidecar: ") for line in lines)


# -- without a process of their own --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], 2),
        (["--help"], 0),
        (["-h"], 0),
        (["serve", "-h"], 0),
        (["--version"], 0),
        (["nonsense"], 2),
    ],
)
def test_usage(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert (out if code == 0 else err).strip()
    if argv == ["--version"]:
        assert out == f"pd-sidecar {__version__}\n"
    if argv == ["--help"]:
        assert "serve" in out
        assert "check-config" in out


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--unknown"], 1),
        (["--port"], 1),
        (["--config", "/nonexistent/file"], 1),
        (["--prefill", "a", "--prefill", "b:0", "--kv-connector", "x"], 3),
        (["--prefill-allow", "10.0.0.1/8\nx"], 1),
    ],
)
def test_one_line_for_each_mistake(argv: list[str], lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == lines
    assert err.startswith("pd-sidecar: ")


def test_check_config_shows_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    monkeypatch.setattr(config, "SECRET", re.compile("prefill$"))
    assert main(["check-config", "--prefill", "hidden-host:1"]) == 0
    assert "hidden-host" not in capsys.readouterr().out


MANIFEST = [
    *(
        "--port=8000",
        "--vllm-port=8200",
        "--connector=nixlv2",
        "--enable-ssrf-protection=true",
        "--metrics-port=9091",
    ),
    *("--data-parallel-size=1", "--prefill-max-retries=1"),
]
"""The arguments of a decode pod's routing proxy in an llm-d manifest, but for its log level."""


def test_manifest_of_the_sidecar_that_this_one_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", *MANIFEST]) == 0
    shown = capsys.readouterr()
    effective = yaml.safe_load(shown.out)
    assert (effective["model-server-port"], effective["prefill-attempts"]) == (8200, 2)
    (warning,) = shown.err.splitlines()
    assert "--prefill-allow" in warning, "the one line that has to be added"


def test_what_flags_mean_is_said_where_another_one_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--zap-encoder", "json", "--port", "99999"]) == 2
    shown = capsys.readouterr()
    note, mistake = shown.err.splitlines()
    assert "warning: --zap-encoder" in note
    assert "--port" in mistake
    assert not shown.out
    assert main(["check-config", *MANIFEST, "--prefill-allow=10.0.0.0/8"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda _: None, "does not exist"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: os.mkfifo(path), "is no file"),  # and is not opened: that would wait for a writer
        (lambda path: path.write_text("10.0.0.5:8000\nhttp://x\n"), "line 2: "),
        (lambda path: path.write_bytes(b"#" * (1 << 20) + b"#"), "is larger than 1048576 bytes"),
        (lambda path: path.write_text("10.0.0.5:8000\n"), ""),
        (lambda path: path.write_text(""), ""),
    ],
)
@pytest.mark.parametrize("disagg", ["auto", "off"])
def test_check_config_looks_at_the_file_of_endpoints(
    prepare: Callable[[Path], object], said: str, disagg: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be mounted later: a warning, and no mistake."""
    path = tmp_path / "endpoints"
    prepare(path)
    assert main(["check-config", f"--discovery=file:{path}", "--disagg", disagg]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["discovery"] == f"file:{path}"
    assert len(shown.err.splitlines()) == bool(said)
    if said:
        assert shown.err.startswith(f"pd-sidecar: warning: --discovery file:{path}: ")
        assert said in shown.err
        assert "read again every second" in shown.err


def test_without_a_command_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port=eighty"]) == 2
    assert "--port" in capsys.readouterr().err

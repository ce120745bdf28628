"""The way from a fresh clone to a running environment: the set-up script with stand-ins for Python, and the locks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What the script may rely on besides Python: nothing beyond POSIX.
TOOLS = ("cat", "cmp", "cp", "dirname", "mkdir", "rm", "sh")

# Answers `-c` as a Python of the given version would, and only notes what it is asked to install.
STAND_IN = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo {name} >>made.log ;;
"-m pip") echo "$*" >>pip.log && exit ${{PIP_EXIT:-0}} ;;
-c*) exec {python} -c 'import sys; sys.version_info = {version}; exec(sys.argv[1])' "$2" ;;
esac
"""


class Clone:
    """A copy of what the script reads, on a machine that has only the Pythons given to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "clone"
        self.bin = directory / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        (self.directory / "deploy").mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / "setup-env", self.directory / "deploy")
        for name in ("pyproject.toml", "requirements.lock", "requirements-dev.lock"):
            (self.directory / name).write_text(f"{name}\n")

    def add_python(self, name: str, version: tuple[int, int]) -> None:
        self._write(name, STAND_IN.format(name=name, version=(*version, 0), python=sys.executable))

    def add_dead_shim(self, name: str) -> None:
        self._write(name, "#!/bin/sh\nexit 127\n")

    def _write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def set_up(self, what: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.directory / "deploy" / "setup-env", what],
            env={"PATH": str(self.bin), "HOME": os.devnull, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> list[str]:
        """Return what pip was asked to install since the last look."""
        log = self.directory / "pip.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.split()[-1] for line in lines]

    def made_with(self) -> list[str]:
        """Return the Pythons that .venv was made with, one for each time."""
        log = self.directory / "made.log"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_second_set_up_does_nothing(clone):
    clone.add_python("python3", (3, 11))

    assert clone.set_up("service").returncode == 0
    assert clone.installed() == ["requirements.lock", "."]

    again = clone.set_up("service")
    assert (again.returncode, again.stdout, clone.installed()) == (0, "", [])


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock"])
def test_changed_file_is_installed_again_into_the_same_environment(clone, name):
    clone.add_python("python3", (3, 11))
    clone.set_up("service")
    clone.installed()

    (clone.directory / name).write_text("changed\n")

    assert clone.set_up("service").returncode == 0
    assert clone.installed() == ["requirements.lock", "."]
    assert clone.made_with() == ["python3"]


def test_failed_installation_is_tried_again(clone):
    clone.add_python("python3", (3, 11))

    assert clone.set_up("service", PIP_EXIT="1").returncode != 0
    clone.installed()

    assert clone.set_up("service").returncode == 0
    assert clone.installed() == ["requirements.lock", "."]


def test_failed_upgrade_forgets_the_installation_before_it(clone):
    clone.add_python("python3", (3, 11))
    clone.set_up("service")

    clone.set_up("everything", PIP_EXIT="1")
    clone.installed()

    clone.set_up("service")
    assert clone.installed() == ["requirements.lock", "."]


def test_environment_of_the_service_is_extended_to_everything_and_serves_both(clone):
    clone.add_python("python3", (3, 12))
    clone.set_up("service")
    clone.installed()

    clone.set_up("everything")
    assert clone.installed() == ["requirements-dev.lock", "."]

    clone.set_up("service")
    clone.set_up("everything")
    assert clone.installed() == []
    assert clone.made_with() == ["python3"]


def test_service_prefers_a_python_that_fits_everything(clone):
    clone.add_python("python3", (3, 13))
    clone.add_dead_shim("python3.12")
    clone.add_python("python3.11", (3, 11))

    assert clone.set_up("service").returncode == 0
    assert clone.made_with() == ["python3.11"]


def test_service_takes_a_newer_python_where_there_is_no_other(clone):
    clone.add_python("python3", (3, 13))
    clone.add_dead_shim("python3.12")

    assert clone.set_up("service").returncode == 0
    assert clone.made_with() == ["python3"]


def test_missing_python_for_everything_says_what_to_install(clone):
    clone.add_python("python3", (3, 13))

    failed = clone.set_up("everything")

    assert failed.returncode == 1
    assert "install Python 3.11 or 3.12, or name one with make PYTHON=" in failed.stderr
    assert clone.installed() == []


def test_environment_whose_python_does_not_fit_everything_is_rebuilt(clone):
    clone.add_python("python3", (3, 13))
    clone.set_up("service")
    clone.installed()
    clone.add_python("python3.12", (3, 12))

    rebuilt = clone.set_up("everything")

    assert "rebuilding .venv" in rebuilt.stdout
    assert clone.made_with() == ["python3", "python3.12"]
    assert clone.installed() == ["requirements-dev.lock", "."]


def test_environment_stays_when_nothing_fits_better(clone):
    clone.add_python("python3", (3, 13))
    clone.set_up("service")
    clone.installed()

    assert clone.set_up("everything").returncode == 1

    assert clone.set_up("service").returncode == 0
    assert clone.installed() == []


def test_python_named_by_the_user_is_taken_or_refused_but_not_replaced(clone):
    clone.add_python("python3", (3, 11))
    clone.add_python("mine", (3, 12))
    clone.add_python("old", (3, 10))

    refused = clone.set_up("service", PYTHON="old")
    assert refused.returncode == 1
    assert "unfit version: old" in refused.stderr

    assert clone.set_up("service", PYTHON="mine").returncode == 0
    assert clone.made_with() == ["mine"]


def lock_pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.partition("#")[0].strip() for line in lines if not line.lstrip().startswith("#")]


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_lock_pins_every_version_and_names_no_place_to_get_it_from(name):
    pins = lock_pins(name)

    assert pins
    assert [pin for pin in pins if "==" not in pin] == []
    assert "://" not in (ROOT / name).read_text(encoding="utf-8")


def test_locks_agree_on_versions():
    named = [pin.partition(" ;")[0] for pin in lock_pins("requirements-dev.lock")]

    assert [pin for pin in lock_pins("requirements.lock") if pin.partition(" ;")[0] not in named] == []


def test_every_dependency_of_the_project_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    assert missing_from("requirements.lock", project["dependencies"]) == []
    assert missing_from("requirements-dev.lock", [name for extra in extras.values() for name in extra]) == []


def missing_from(lock: str, requirements: list[str]) -> list[str]:
    locked = {pin.partition("==")[0] for pin in lock_pins(lock)}
    names = (requirement.partition(";")[0].strip() for requirement in requirements)
    return [name for name in names if not name.startswith("lakefeed[") and _bare(name) not in locked]


def _bare(requirement: str) -> str:
    """Cut off versions and extras: `aiohttp[speedups]>=3.14` -> `aiohttp`."""
    return requirement[: next((i for i, c in enumerate(requirement) if c in "[<>=!~ "), len(requirement))]

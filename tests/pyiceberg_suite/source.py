"""The source distribution of PyIceberg, fetched once and unpacked for a run. Owns what lies in `.pyiceberg-suite/`.

    .pyiceberg-suite/sdist/       the archive as it came, and a mark of the version and packages it was fetched with
    .pyiceberg-suite/packages/    what its tests import and this project does not
    .pyiceberg-suite/run/         the tests of one run, the addresses in them replaced, and its report

Only the tests are unpacked, so that they meet the installed PyIceberg and not the one beside them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".pyiceberg-suite"
SDIST = TARGET / "sdist"
PACKAGES = TARGET / "packages"
RUN = TARGET / "run"

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PIP_TIMEOUT_S = 240

# `pyproject.toml` has the tests' markers and warnings; `provision.py` names the tables that upstream makes with Spark.
_UNPACKED = ("tests/", "dev/provision.py", "pyproject.toml")


def fetch() -> bool:
    """Bring the archive and the packages here, unless they are; tell whether they could be had."""
    pyiceberg = f"pyiceberg=={version('pyiceberg')}"
    wanted = f"{pyiceberg}\n{_REQUIREMENTS.read_text(encoding='utf-8')}"
    # The mark is written last, so that an interrupted download is done again, as is one for another version.
    mark = SDIST / "fetched.txt"
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return True
    shutil.rmtree(TARGET, ignore_errors=True)
    SDIST.mkdir(parents=True)
    lock = ROOT / "requirements-dev.lock"
    if not (
        _pip("download", "--no-deps", "--no-binary=pyiceberg", f"--dest={SDIST}", pyiceberg)
        and _pip("install", f"--target={PACKAGES}", f"--constraint={lock}", f"--requirement={_REQUIREMENTS}")
    ):
        return False
    mark.write_text(wanted, encoding="utf-8")
    return True


def _pip(*arguments: str) -> bool:
    try:
        subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=_PIP_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def unpack(replaced: Mapping[str, str]) -> None:
    """Lay the tests out anew, each key of `replaced` giving way to its value: addresses are written into them."""
    shutil.rmtree(RUN, ignore_errors=True)
    (archive,) = SDIST.glob("pyiceberg-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name.startswith(_UNPACKED):
                tar.extract(member, RUN, filter="data")
    for path in RUN.glob("tests/**/*.py"):
        path.write_text(_replace(path.read_text(encoding="utf-8"), replaced), encoding="utf-8")


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text

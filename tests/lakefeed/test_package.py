"""The installed package: its public names, what importing it loads, and its wheel beside a user's own folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lakefeed

ROOT = Path(__file__).parents[2]

# What a cluster's driver lacks; it has click and rich.
SERVICE_ONLY = {"aiobotocore", "aiohttp", "fastavro", "msgspec", "numpy", "obstore", "orjson", "pyarrow", "websockets"}


def loaded_by(program: str) -> set[str]:
    """Return the top-level packages that a program has loaded at its end."""
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_public_names_exist_and_are_typed():
    assert lakefeed.__version__ == "0.1.0"
    assert [name for name in lakefeed.__all__ if not hasattr(lakefeed, name)] == []
    assert set(lakefeed.__all__) <= set(dir(lakefeed))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lakefeed.nothing  # type: ignore[attr-defined]


def test_import_of_the_package_loads_no_third_party_package():
    assert not loaded_by("import lakefeed; lakefeed.__version__") & {*SERVICE_ONLY, "click", "pyspark", "rich"}


def test_public_names_for_clusters_need_nothing_of_the_service():
    used = "import lakefeed\nfor name in lakefeed.__all__: getattr(lakefeed, name)"
    assert not loaded_by(used) & {*SERVICE_ONLY, "pyspark"}


def test_modules_of_the_pipeline_need_nothing_of_the_service():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "pipeline").rglob("*.py")
        if path.name != "__init__.py"
    ]
    imports = "\n".join(f"import lakefeed.{module}" for module in modules)
    # PySpark brings numpy and pyarrow along by itself.
    assert not loaded_by(imports) & (SERVICE_ONLY - {"numpy", "pyarrow"})


def test_settings_of_all_commands_load_without_pyspark():
    assert not loaded_by("import lakefeed.ingest.config") & {"pyspark", "aiohttp", "aiobotocore"}


def test_service_does_not_load_pyiceberg():
    assert not loaded_by("import lakefeed.ingest.service") & {"pyiceberg", "pyspark", "duckdb"}


def test_wheel_has_one_package_and_works_beside_folders_of_the_same_names(tmp_path: Path):
    source, target, work = tmp_path / "source", tmp_path / "site", tmp_path / "work"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "build", "dist", "*.egg-info", "data")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("lakefeed-*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(target)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"lakefeed"}
    assert "lakefeed/pipeline/spark/session.py" in names
    assert "lakefeed/py.typed" in names

    for folder in ("ingest", "writer", "catalog", "pipeline"):
        (work / folder).mkdir(parents=True)
        (work / folder / "__init__.py").write_text(f"raise ImportError('this {folder} belongs to the user')")
    program = f"""
import sys
sys.path[:] = [{str(work)!r}, {str(target)!r}, *(path for path in sys.path if path not in ("", {str(ROOT)!r}))]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import lakefeed.ingest.cli.main, lakefeed.ingest.config, lakefeed.pipeline.spark.session, lakefeed.catalog.config
assert lakefeed.__file__.startswith({str(target)!r}), lakefeed.__file__
lakefeed.ingest.cli.main.main(["config", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"server.http_port": 8181' in done.stdout

"""What the format's modules load: a catalog process must do without pyarrow, and a service without PyIceberg."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("imported", "not_loaded"),
    [
        ("lakefeed.catalog.app", "pyarrow"),
        ("lakefeed.iceberg.manifests", "pyarrow"),
        ("lakefeed.iceberg.terms", "numpy"),
        ("lakefeed.ingest.service", "pyiceberg"),
    ],
)
def test_import_does_not_load_what_is_large(imported, not_loaded):
    program = f"import sys, {imported}; sys.exit({not_loaded!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

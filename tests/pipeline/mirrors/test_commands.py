from __future__ import annotations

import pytest
from click.testing import CliRunner

from lakefeed.ingest.cli.main import main


def test_a_command_that_needs_a_driver_of_its_own_offers_no_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--remote" not in CliRunner().invoke(main, ["mirror", "run", "--help"]).output
    assert "--remote" in CliRunner().invoke(main, ["mirror", "status", "--help"]).output
    monkeypatch.setenv("LAKEFEED_PIPELINE_SPARK_REMOTE", "sc://127.0.0.1:1")
    refused = CliRunner().invoke(main, ["mirror", "run", "--once"])
    assert (refused.exit_code, "remote=sc://127.0.0.1:1" in refused.output) == (2, True), refused.output


def test_help_of_maintenance_names_the_caps_of_consumers() -> None:
    shown = " ".join(CliRunner().invoke(main, ["maintain", "--help"]).output.split())
    assert "three days" in shown
    assert "lakefeed.consumer-snapshots-max" in shown

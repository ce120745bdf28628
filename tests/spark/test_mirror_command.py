"""`lakefeed mirror` as an operator runs it: tables and checkpoints on S3, settings in the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.clients import open_pyiceberg
from tests.mirror_events import Pusher
from tests.s3_server import S3Server
from tests.service_process import service_process
from tests.spark.conftest import needs_s3a


@needs_s3a
def test_command_mirrors_tables_on_s3_with_checkpoints_on_s3(
    tmp_path: Path, s3_server: S3Server, run_lakefeed: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lakefeed.pipeline.mirrors.commands.set_up_logging", lambda _level: None)
    warehouse = s3_server.new_warehouse()
    bucket = warehouse["storage.warehouse"].removeprefix("s3://").partition("/")[0]
    with service_process(tmp_path, warehouse) as service:
        service.start()
        push = Pusher(service, "shop", "users")
        push.insert(1, name="Ada").insert(2, name="Grace").update(2, name="Hopper").delete(1).commit()
        command = ("mirror", "run", "users", "--once", "--url", service.http_url, "--catalog-name", "on_s3")
        variables = {f"LAKEFEED_{key.replace('.', '_').upper()}": value for key, value in warehouse.items()}
        done = run_lakefeed(*command, "--checkpoints", f"s3a://{bucket}/checkpoints", env=variables)
        assert done.exit_code == 0, done.output
        catalog = open_pyiceberg(service.http_url, s3=s3_server.settings)
        mirror = catalog.load_table("default.users_current").scan().to_arrow()
        assert mirror.select(["id", "name"]).to_pylist() == [{"id": 2, "name": "Hopper"}]
        assert any("/offsets/0" in key for key in s3_server.keys(bucket) if key.startswith("checkpoints/"))

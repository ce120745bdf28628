"""`lakefeed mirror` as an operator has it: a process of its own, tables and checkpoints on S3."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients import open_pyiceberg
from tests.mirror_events import Pusher
from tests.s3_server import S3Server
from tests.service_process import LAKEFEED, service_process
from tests.spark.conftest import needs_s3a

pytestmark = pytest.mark.timeout(600)


@needs_s3a
def test_the_command_mirrors_tables_on_s3_with_checkpoints_there(tmp_path: Path, s3_server: S3Server) -> None:
    warehouse = s3_server.new_warehouse()
    bucket = warehouse["storage.warehouse"].removeprefix("s3://").partition("/")[0]
    with service_process(tmp_path, warehouse) as service:
        service.start()
        push = Pusher(service, "shop", "users")
        push.insert(1, name="Ada").insert(2, name="Grace").update(2, name="Hopper").delete(1).commit()
        command = [LAKEFEED, "mirror", "run", "users", "--once", "--url", service.http_url, "--master", "local[2]"]
        variables = {f"LAKEFEED_{key.replace('.', '_').upper()}": value for key, value in warehouse.items()}
        done = subprocess.run(
            [*command, "--checkpoints", f"s3a://{bucket}/checkpoints"],
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert '"event": "mirror_merged"' in done.stderr
        catalog = open_pyiceberg(service.http_url, s3=s3_server.settings)
        mirror = catalog.load_table("default.users_current").scan().to_arrow()
        assert mirror.select(["id", "name"]).to_pylist() == [{"id": 2, "name": "Hopper"}]
        assert any("/offsets/0" in key for key in s3_server.keys(bucket) if key.startswith("checkpoints/"))

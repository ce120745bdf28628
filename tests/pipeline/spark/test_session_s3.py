from __future__ import annotations

from pathlib import Path

import pytest

from lakefeed.pipeline.spark.session import SessionConfig, load_s3_settings, s3_conf
from lakefeed.settings import SettingsError

KEY = {"LAKEFEED_STORAGE_S3_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lakefeed.toml"
    path.write_text('[storage]\ns3_endpoint = "http://file"\ns3_path_style = true\ns3_access_key_id = "id"\n')
    return path


def test_keys_are_those_of_the_service_under_the_names_of_iceberg_and_hadoop(file):
    s3 = load_s3_settings(file, KEY)

    iceberg = {
        "spark.sql.catalog.lake.client.region": "us-east-1",
        "spark.sql.catalog.lake.s3.endpoint": "http://file",
        "spark.sql.catalog.lake.s3.path-style-access": "true",
        "spark.sql.catalog.lake.s3.access-key-id": "id",
        "spark.sql.catalog.lake.s3.secret-access-key": "secret",
    }
    hadoop = {
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.endpoint": "http://file",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": "id",
        "spark.hadoop.fs.s3a.secret.key": "secret",
    }
    assert s3_conf(s3, SessionConfig()) == iceberg | hadoop
    assert s3_conf(s3, SessionConfig(remote="sc://host")) == iceberg


def test_environment_wins_over_the_file(file):
    assert (
        load_s3_settings(file, {**KEY, "LAKEFEED_STORAGE_S3_ENDPOINT": "http://here"})["s3_endpoint"] == "http://here"
    )


def test_temporary_keys_need_another_provider_of_hadoop():
    conf = s3_conf(load_s3_settings(None, {"LAKEFEED_STORAGE_S3_SESSION_TOKEN": "t"}), SessionConfig())

    assert conf["spark.hadoop.fs.s3a.session.token"] == "t"
    assert conf["spark.hadoop.fs.s3a.aws.credentials.provider"].endswith("TemporaryAWSCredentialsProvider")


def test_service_on_local_files_has_no_settings_of_s3(tmp_path):
    file = tmp_path / "local.toml"
    file.write_text('[storage]\nwarehouse = "/lake"\ns3_path_style = false\n')

    assert load_s3_settings(file, {"LAKEFEED_STORAGE_S3_PATH_STYLE": "false"}) == {}


def test_missing_settings_file_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="cannot read the configuration"):
        load_s3_settings(tmp_path / "absent.toml", {})

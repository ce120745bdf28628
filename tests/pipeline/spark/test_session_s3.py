from __future__ import annotations

from pathlib import Path

import pytest

from lakefeed.pipeline.spark.session import catalog_properties, hadoop_conf, load_s3_settings
from lakefeed.settings import SettingsError

KEY = {"LAKEFEED_STORAGE_S3_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lakefeed.toml"
    path.write_text('[storage]\ns3_endpoint = "http://file"\ns3_path_style = true\ns3_access_key_id = "id"\n')
    return path


def test_keys_are_those_of_the_service_under_the_names_of_iceberg_and_hadoop(file):
    s3 = load_s3_settings(file, KEY)

    assert catalog_properties(s3) == {
        "client.region": "us-east-1",
        "s3.endpoint": "http://file",
        "s3.path-style-access": "true",
        "s3.access-key-id": "id",
        "s3.secret-access-key": "secret",
    }
    assert hadoop_conf(s3) == {
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.endpoint": "http://file",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": "id",
        "spark.hadoop.fs.s3a.secret.key": "secret",
    }


def test_environment_wins_over_the_file(file):
    assert (
        load_s3_settings(file, {**KEY, "LAKEFEED_STORAGE_S3_ENDPOINT": "http://here"})["s3_endpoint"] == "http://here"
    )


def test_temporary_keys_are_told_apart_to_hadoop():
    conf = hadoop_conf(load_s3_settings(None, {"LAKEFEED_STORAGE_S3_SESSION_TOKEN": "t"}))

    assert conf["spark.hadoop.fs.s3a.session.token"] == "t"
    assert conf["spark.hadoop.fs.s3a.aws.credentials.provider"].endswith("TemporaryAWSCredentialsProvider")


def test_service_on_local_files_says_nothing_of_s3(tmp_path):
    file = tmp_path / "local.toml"
    file.write_text('[storage]\nwarehouse = "/lake"\ns3_path_style = false\n')

    assert load_s3_settings(file, {"LAKEFEED_STORAGE_S3_PATH_STYLE": "false"}) == {}


def test_file_that_is_named_and_missing_is_told(tmp_path):
    with pytest.raises(SettingsError, match="cannot read the configuration"):
        load_s3_settings(tmp_path / "absent.toml", {})

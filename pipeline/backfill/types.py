"""Columns of an input in the columns of a table: which type fits into which, and what the table has to change. Pure.

    same type, or one that the table's represents exactly    stored as it is
    one that Iceberg can widen the table's to                the column is widened first: int to long, float to double,
                                                             decimal to more digits
    text, where the table has numbers, dates ...             each value exactly, or the text is rescued
    no column of this name, now or formerly                  the column is added
    anything else                                            an error that names the column, before anything is written

A fit never changes a value. Names are matched as Spark does, without case. A former name of a column matches that
column, as in live rows, unless another column has the name now. Columns that the input lacks are unchanged by it.

Text is read without Spark's casts, which cut `1.5` to 1, round decimals and accept `2026` as a date: text that is not
exactly a value of the type gives null, and the caller keeps the text. docs/schemas.md describes the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, types
from pyspark.sql import functions as sql

from lakefeed.contract.changes import RESERVED_PREFIX
from lakefeed.pipeline.mirrors.table import former_names
from lakefeed.pipeline.spark.tables import quoted, type_sql

# Iceberg's metadata columns, which Spark rejects as names; the writer has the same list.
_ICEBERG_NAMES = frozenset(
    (
        *("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"),
        *("_change_type", "_change_ordinal", "_commit_snapshot_id"),
    )
)
_NAME_MAX_CHARS = 255

# Metadata of Spark's JDBC reader for a time of day that it read as a timestamp, without its fraction.
_SPARK_TIME = "logical_time_type"

# Maximum digits of each integer type.
_DIGITS: dict[type[types.DataType], int] = {
    types.ByteType: 3,
    types.ShortType: 5,
    types.IntegerType: 10,
    types.LongType: 19,
}
_DECIMAL_MAX_DIGITS = 38

_PLAIN = (
    *(types.BooleanType, types.IntegerType, types.LongType, types.FloatType, types.DoubleType, types.DecimalType),
    *(types.DateType, types.TimestampType, types.TimestampNTZType, types.StringType, types.BinaryType),
)

Convert = Callable[[Column], Column]

# Placeholder for the path of a column in a change of it.
PATH = "\N{WHITE SQUARE}"


@dataclass(frozen=True, slots=True)
class FittedColumn:
    """A column of the input: its name there, its name and type in the table, and how its values are converted.

    `is_text` marks text that is read as another type, where some values may not fit.
    """

    given: str
    name: str
    type: types.DataType
    given_type: types.DataType
    convert: Convert | None = None
    is_text: bool = False


@dataclass(slots=True)
class SchemaFit:
    """All columns of an input, the changes that the table needs (SQL after ALTER TABLE), and what does not fit."""

    columns: list[FittedColumn] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def fit_columns(
    given: types.StructType,
    known: types.StructType,
    *,
    uuids: Collection[str] = (),
    declared: types.StructType | None = None,
) -> SchemaFit:
    """Fit an input into the columns of a table, which may have none.

    `uuids` are columns of the table that look like text to Spark; `declared` are types for new text columns.
    """
    wanted = {each.name.lower(): each.dataType for each in declared or ()}
    fitting = SchemaFit()
    by_name = columns_by_name(known)
    seen: set[str] = set()
    matched: dict[str, str] = {}
    for each in given.fields:
        folded = each.name.lower()
        if (problem := _column_problem(each)) or folded in seen:
            fitting.problems.append(problem or f"two columns have the same name: column={each.name}")
            continue
        seen.add(folded)
        column = by_name.get(folded)
        if column is None:
            _add(fitting, each, wanted.get(folded))
        elif (other := matched.setdefault(column.name, each.name)) != each.name:
            facts = f"columns={other},{each.name} table_column={column.name}"
            fitting.problems.append(f"two columns match one, by its name and by a former name: {facts}")
        elif isinstance(each.dataType, types.StringType) and (
            column.name in uuids or is_readable_from_text(column.dataType)
        ):
            fitting.columns.append(FittedColumn(each.name, column.name, column.dataType, each.dataType, is_text=True))
        else:
            _match(fitting, each, column)
    return fitting


def _add(fitting: SchemaFit, given: types.StructField, declared: types.DataType | None) -> None:
    stored = stored_type(declared or given.dataType)
    if stored is None:
        shown = (declared or given.dataType).simpleString()
        fitting.problems.append(f"type is not supported: column={given.name} type={shown}")
        return
    fitting.changes.append(f"ADD COLUMN {quoted(given.name)} {type_sql(stored)}")
    is_text = isinstance(given.dataType, types.StringType) and is_readable_from_text(stored)
    convert = None if is_text else fit_type(given.dataType, stored).convert
    fitting.columns.append(FittedColumn(given.name, given.name, stored, given.dataType, convert, is_text=is_text))


def _match(fitting: SchemaFit, given: types.StructField, known: types.StructField) -> None:
    fit = fit_type(given.dataType, known.dataType)
    if fit.problems:
        facts = f"type={given.dataType.simpleString()} table_type={known.dataType.simpleString()}"
        inner = "; ".join(fit.problems)
        fitting.problems.append(f"type does not fit the table: column={given.name} {facts}: {inner}")
        return
    path = quoted(known.name)
    fitting.changes += [change.replace(PATH, path + inner) for inner, change in fit.changes]
    fitting.columns.append(FittedColumn(given.name, known.name, fit.stored, given.dataType, fit.convert))


def _column_problem(given: types.StructField) -> str | None:
    name, folded = given.name, given.name.lower()
    if not 0 < len(name) <= _NAME_MAX_CHARS or min(name) < " ":
        return f"invalid column name, rename it: column={name!r}"
    if folded.startswith(RESERVED_PREFIX) or folded in _ICEBERG_NAMES:
        return f"column name is reserved, rename it: column={name}"
    if (given.metadata or {}).get(_SPARK_TIME):
        return f"a time of day would become a timestamp without fraction, select it as text with a query: column={name}"
    return None


# -- types, at any depth


@dataclass(frozen=True, slots=True)
class TypeFit:
    """How values of a type are stored in another: the stored type, its (path, change) pairs, and what prevents it."""

    stored: types.DataType
    convert: Convert | None = None
    changes: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


def stored_type(type_: types.DataType) -> types.DataType | None:
    """Return the type of a new column for values of a type; None if there is none."""
    if isinstance(type_, types.ByteType | types.ShortType):
        return types.IntegerType()
    if isinstance(type_, types.CharType | types.VarcharType):
        return types.StringType()
    if isinstance(type_, _PLAIN):
        return type_
    if isinstance(type_, types.ArrayType):
        element = stored_type(type_.elementType)
        return None if element is None else types.ArrayType(element)
    if isinstance(type_, types.MapType):
        key, value = stored_type(type_.keyType), stored_type(type_.valueType)
        return None if key is None or value is None else types.MapType(key, value)
    if isinstance(type_, types.StructType):
        inner = [(each.name, stored_type(each.dataType)) for each in type_.fields]
        fields = [types.StructField(name, each) for name, each in inner if each is not None]
        return types.StructType(fields) if fields and len(fields) == len(inner) else None
    return None


def columns_by_name(known: types.StructType) -> dict[str, types.StructField]:
    """Return columns, or fields of a struct, by lower-case name, and by former names that no other column has now."""
    former = {name.lower(): each for each in reversed(known.fields) for name in former_names(each)}
    return former | {each.name.lower(): each for each in known.fields}


def fit_type(given: types.DataType, known: types.DataType) -> TypeFit:
    """Fit a given type into a known one."""
    match given, known:
        case types.StructType(), types.StructType():
            return _fit_struct(given, known)
        case types.ArrayType(), types.ArrayType():
            inner = fit_type(given.elementType, known.elementType)
            convert = None if inner.convert is None else _over_elements(inner.convert)
            return TypeFit(types.ArrayType(inner.stored), convert, _below(".element", inner.changes), inner.problems)
        case types.MapType(), types.MapType():
            return _fit_map(given, known)
    return _fit_plain(given, known)


def _fit_plain(given: types.DataType, known: types.DataType) -> TypeFit:
    stored = stored_type(given)
    if known in (given, stored):
        return TypeFit(known, None if given == known else _cast(known))
    if _holds(known, given):
        return TypeFit(known, _cast(known))
    wider = _widened(known, given)
    if wider is not None:
        return TypeFit(wider, _cast(wider), (("", f"ALTER COLUMN {PATH} TYPE {type_sql(wider)}"),))
    return TypeFit(known, problems=(f"{given.simpleString()} does not fit {known.simpleString()}",))


def _holds(known: types.DataType, given: types.DataType) -> bool:
    """Return whether a type represents every value of another one exactly."""
    digits = _DIGITS.get(type(given))
    match known:
        case types.IntegerType() | types.LongType():
            return digits is not None and digits <= _DIGITS[type(known)]
        case types.DoubleType():
            return isinstance(given, types.FloatType) or (digits or 99) <= _DIGITS[types.IntegerType]
        case types.FloatType():
            return (digits or 99) <= _DIGITS[types.ShortType]
        case types.DecimalType():
            whole, scale = _whole_and_scale(given)
            return scale <= known.scale and whole <= known.precision - known.scale
        case types.StringType():
            return isinstance(given, types.CharType | types.VarcharType)
    return False


def _widened(known: types.DataType, given: types.DataType) -> types.DataType | None:
    """Return the type to which a table's column can be widened to represent another one; None if there is none."""
    match known, given:
        case types.IntegerType(), types.LongType():
            return types.LongType()
        case types.FloatType(), types.DoubleType() | types.IntegerType():
            return types.DoubleType()
        case types.DecimalType(), _:
            whole, scale = _whole_and_scale(given)
            precision = max(whole, known.precision - known.scale) + known.scale
            if scale <= known.scale and precision <= _DECIMAL_MAX_DIGITS:
                return types.DecimalType(precision, known.scale)
    return None


def _whole_and_scale(given: types.DataType) -> tuple[int, int]:
    """Return the digits before and after the point; more than possible for types that are not exact numbers."""
    if isinstance(given, types.DecimalType):
        return given.precision - given.scale, given.scale
    digits = _DIGITS.get(type(given))
    return (99, 99) if digits is None else (digits, 0)


def _fit_map(given: types.MapType, known: types.MapType) -> TypeFit:
    key, value = fit_type(given.keyType, known.keyType), fit_type(given.valueType, known.valueType)
    problems = (*key.problems, *value.problems)
    if key.changes:
        problems = (*problems, "the key type of a map cannot be changed")
    convert = None
    if key.convert is not None or value.convert is not None:
        convert = _over_entries(key.convert or _as_is, value.convert or _as_is)
    return TypeFit(types.MapType(key.stored, value.stored), convert, _below(".value", value.changes), problems)


def _fit_struct(given: types.StructType, known: types.StructType) -> TypeFit:
    """Fit field by field; the result has the table's fields in its order, then new ones."""
    by_name = columns_by_name(known)
    own_fields: dict[str, types.StructField] = {}
    problems: list[str] = []
    for own in given.fields:
        name = by_name[own.name.lower()].name if own.name.lower() in by_name else own.name.lower()
        if own_fields.setdefault(name, own) is not own:
            problems.append(f"two fields match one: fields={own_fields[name].name},{own.name}")
    parts: list[tuple[str, str | None, TypeFit]] = []
    for field_ in known.fields:
        found = own_fields.pop(field_.name, None)
        fit = TypeFit(field_.dataType) if found is None else fit_type(found.dataType, field_.dataType)
        parts.append((field_.name, None if found is None else found.name, fit))
    problems += [problem for _, _, fit in parts for problem in fit.problems]
    changes = [change for name, _, fit in parts for change in _below(f".{quoted(name)}", fit.changes)]
    for own in own_fields.values():
        stored = stored_type(own.dataType)
        if stored is None or not own.name:
            problems.append(f"type is not supported: field={own.name} type={own.dataType.simpleString()}")
            continue
        changes.append((f".{quoted(own.name)}", f"ADD COLUMN {PATH} {type_sql(stored)}"))
        parts.append((own.name, own.name, fit_type(own.dataType, stored)))
    stored_struct = types.StructType([types.StructField(name, fit.stored) for name, _, fit in parts])
    is_same = [name for name, _, _ in parts] == given.names and all(fit.convert is None for _, _, fit in parts)
    return TypeFit(stored_struct, None if is_same else _rebuilt(parts), tuple(changes), tuple(problems))


def _rebuilt(parts: Sequence[tuple[str, str | None, TypeFit]]) -> Convert:
    def convert(value: Column) -> Column:
        fields = [
            sql.lit(None).cast(fit.stored).alias(name)
            if own is None
            else (fit.convert or _as_is)(value.getField(own)).alias(name)
            for name, own, fit in parts
        ]
        return sql.when(value.isNotNull(), sql.struct(*fields))

    return convert


def _below(path: str, changes: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((path + inner, change) for inner, change in changes)


def _over_elements(convert: Convert) -> Convert:
    return lambda value: sql.transform(value, convert)


def _over_entries(key: Convert, value: Convert) -> Convert:
    def pair(entry: Column) -> Column:
        return sql.struct(key(entry["key"]).alias("key"), value(entry["value"]).alias("value"))

    return lambda each: sql.map_from_entries(sql.transform(sql.map_entries(each), pair))


def _cast(type_: types.DataType) -> Convert:
    return lambda value: value.cast(type_)


def _as_is(value: Column) -> Column:
    return value


# -- text

_INTEGER = r"[+-]?\d+"
_REAL = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "infinity": "Infinity", "-infinity": "-Infinity"}

_CASTS: dict[type[types.DataType], str] = {
    types.ByteType: _INTEGER,
    types.ShortType: _INTEGER,
    types.IntegerType: _INTEGER,
    types.LongType: _INTEGER,
    types.DateType: _DATE,
    types.TimestampType: _DATE + _TIME + _ZONE,
    types.TimestampNTZType: _DATE + _TIME,
}


def is_readable_from_text(type_: types.DataType) -> bool:
    """Return whether values of a type can be read from text."""
    others = (types.BooleanType, types.FloatType, types.DoubleType, types.DecimalType, types.BinaryType)
    return isinstance(type_, (*_CASTS, *others))


def read_text(column: str, type_: types.DataType) -> Column:
    """Read a text column, given by its quoted name, as values of a type; null where the text is not a value.

    A target of type text is a uuid column, which Spark has no type for.
    """
    text = sql.expr(column)
    match type_:
        case types.StringType():
            return sql.when(_matches(text, _UUID), sql.lower(text))
        case types.BooleanType():
            return sql.when(_matches(text, "(?i)true|t"), True).when(_matches(text, "(?i)false|f"), False)
        case types.FloatType() | types.DoubleType():
            return _read_real(column, type_)
        case types.DecimalType():
            return sql.when(_matches(text, _decimal_pattern(type_)), _try_cast(column, type_))
        case types.BinaryType():
            data = sql.unbase64(text)
            again = sql.regexp_replace(sql.base64(data), r"\s", "")
            return sql.when(_matches(text, "[A-Za-z0-9+/]*={0,2}") & (again == text), data)
    return sql.when(_matches(text, _CASTS[type(type_)]), _try_cast(column, type_))


def _matches(text: Column, pattern: str) -> Column:
    return text.rlike(f"^(?:{pattern})$") & ~text.endswith("\n")


def _try_cast(column: str, type_: types.DataType) -> Column:
    return sql.expr(f"try_cast({column} AS {type_.simpleString()})")


def _read_real(column: str, type_: types.DataType) -> Column:
    """Read a number; null if it is too large for the type, or a text such as `1d` that only Java accepts."""
    text, number = sql.expr(column), _try_cast(column, type_)
    is_finite = ~sql.isnan(number) & (sql.abs(number) < sql.lit(float("inf")))
    found = sql.when(_matches(text, _REAL) & is_finite, number)
    for name, value in _NOT_FINITE.items():
        found = found.when(sql.lower(text) == name, sql.lit(value).cast(type_))
    return found


def _decimal_pattern(type_: types.DecimalType) -> str:
    whole, fraction = type_.precision - type_.scale, type_.scale
    return rf"[+-]?0*\d{{0,{whole}}}(\.\d{{0,{fraction}}}0*)?"

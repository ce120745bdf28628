"""Types of an input in types of a table, at any depth. Owns which fits into which, and how values get there.

A fit never changes a value: what the table's type does not hold exactly is widened, as Iceberg allows it, or a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, types
from pyspark.sql import functions as sql

from pipeline.mirrors.layout import former_names
from pipeline.mirrors.sql_text import quoted

# Digits that each type of whole numbers may have.
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

# Where the path of a column stands in a change of it.
PATH = "\N{WHITE SQUARE}"


@dataclass(frozen=True, slots=True)
class Fit:
    """How a type gets into another: what is stored in the end, (path, change) pairs before, and why it does not."""

    stored: types.DataType
    convert: Convert | None = None
    changes: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


def stored_type(type_: types.DataType) -> types.DataType | None:
    """Give the type of a new column for values of a type; None if there is none."""
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
    """Give columns, or fields of a struct, by their names in lower case, and by former ones that none has now."""
    former = {name.lower(): each for each in reversed(known.fields) for name in former_names(each)}
    return former | {each.name.lower(): each for each in known.fields}


def fit_type(given: types.DataType, known: types.DataType) -> Fit:
    """Fit a type into another one."""
    match given, known:
        case types.StructType(), types.StructType():
            return _fit_struct(given, known)
        case types.ArrayType(), types.ArrayType():
            inner = fit_type(given.elementType, known.elementType)
            convert = None if inner.convert is None else _over_elements(inner.convert)
            return Fit(types.ArrayType(inner.stored), convert, _below(".element", inner.changes), inner.problems)
        case types.MapType(), types.MapType():
            return _fit_map(given, known)
    return _fit_plain(given, known)


def _fit_plain(given: types.DataType, known: types.DataType) -> Fit:
    stored = stored_type(given)
    if known in (given, stored):
        return Fit(known, None if given == known else _cast(known))
    if _holds(known, given):
        return Fit(known, _cast(known))
    wider = _widened(known, given)
    if wider is not None:
        return Fit(wider, _cast(wider), (("", f"ALTER COLUMN {PATH} TYPE {type_sql(wider)}"),))
    return Fit(known, problems=(f"{type_text(given)} is no {type_text(known)}",))


def _holds(known: types.DataType, given: types.DataType) -> bool:
    """Tell whether a type holds every value of another exactly."""
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
    """Give the type that a table's column can be widened to, so that it holds another."""
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
    """Count the digits before and behind the point; of what is no exact number, more than there can be."""
    if isinstance(given, types.DecimalType):
        return given.precision - given.scale, given.scale
    digits = _DIGITS.get(type(given))
    return (99, 99) if digits is None else (digits, 0)


def _fit_map(given: types.MapType, known: types.MapType) -> Fit:
    key, value = fit_type(given.keyType, known.keyType), fit_type(given.valueType, known.valueType)
    problems = (*key.problems, *value.problems)
    if key.changes:
        problems = (*problems, "keys of a map cannot be changed")
    convert = None
    if key.convert is not None or value.convert is not None:
        convert = _over_entries(key.convert or _as_is, value.convert or _as_is)
    return Fit(types.MapType(key.stored, value.stored), convert, _below(".value", value.changes), problems)


def _fit_struct(given: types.StructType, known: types.StructType) -> Fit:
    """Fit field by field; the result has the table's fields in its order, and new ones behind them."""
    by_name = columns_by_name(known)
    own_fields: dict[str, types.StructField] = {}
    problems: list[str] = []
    for own in given.fields:
        name = by_name[own.name.lower()].name if own.name.lower() in by_name else own.name.lower()
        if own_fields.setdefault(name, own) is not own:
            problems.append(f"two fields are meant for one: fields={own_fields[name].name},{own.name}")
    parts: list[tuple[str, str | None, Fit]] = []
    for field_ in known.fields:
        found = own_fields.pop(field_.name, None)
        fit = Fit(field_.dataType) if found is None else fit_type(found.dataType, field_.dataType)
        parts.append((field_.name, None if found is None else found.name, fit))
    problems += [problem for _, _, fit in parts for problem in fit.problems]
    changes = [change for name, _, fit in parts for change in _below(f".{quoted(name)}", fit.changes)]
    for own in own_fields.values():
        stored = stored_type(own.dataType)
        if stored is None or not own.name:
            problems.append(f"no field can have this type: field={own.name} type={type_text(own.dataType)}")
            continue
        changes.append((f".{quoted(own.name)}", f"ADD COLUMN {PATH} {type_sql(stored)}"))
        parts.append((own.name, own.name, fit_type(own.dataType, stored)))
    stored_struct = types.StructType([types.StructField(name, fit.stored) for name, _, fit in parts])
    is_same = [name for name, _, _ in parts] == given.names and all(fit.convert is None for _, _, fit in parts)
    return Fit(stored_struct, None if is_same else _rebuilt(parts), tuple(changes), tuple(problems))


def _rebuilt(parts: Sequence[tuple[str, str | None, Fit]]) -> Convert:
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


def type_text(type_: types.DataType) -> str:
    """Write a type for people."""
    return str(type_.simpleString())


def type_sql(type_: types.DataType) -> str:
    """Write a type in SQL, its names quoted."""
    match type_:
        case types.ArrayType():
            return f"ARRAY<{type_sql(type_.elementType)}>"
        case types.MapType():
            return f"MAP<{type_sql(type_.keyType)}, {type_sql(type_.valueType)}>"
        case types.StructType():
            return f"STRUCT<{', '.join(f'{quoted(each.name)}: {type_sql(each.dataType)}' for each in type_.fields)}>"
    return type_text(type_)

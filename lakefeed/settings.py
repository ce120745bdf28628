"""Settings: frozen dataclasses, filled from a TOML file, the environment and flags.

    [writer]                                   a section is one dataclass, derived from Settings
    flush_max_age_s = 5                        or LAKEFEED_WRITER_FLUSH_MAX_AGE_S=5, or a flag
    [pipeline.mirror.tables."sales.orders"]    settings of single tables; in the file only

Flags win over the environment, the environment wins over the file, and the file wins over the defaults. An unknown key
is an error that names the nearest known one, because a misspelled setting must not silently become a default.

Standard library only: the drivers of Spark clusters import this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lakefeed.contract.errors import LakefeedError

MIB = 1 << 20
GIB = 1 << 30

DEFAULT_FILE = Path("lakefeed.toml")
ENVIRONMENT_PREFIX = "LAKEFEED_"

# All sections, so that every command finds a misspelled one, also a command that reads only its own section.
SECTIONS = (
    *("server", "auth", "ingest", "debezium", "log", "writer", "storage", "catalog", "iceberg", "tables"),
    *("pipeline.spark", "pipeline.mirror", "pipeline.maintenance", "pipeline.backfill"),
)

# Variables that begin like a setting but hold the credentials of a command.
CREDENTIAL_VARIABLES = ("LAKEFEED_TOKEN", "LAKEFEED_JDBC_PASSWORD")

_NUMBER_OF_BYTES = re.compile(r"(\d+)\s*(KiB|MiB|GiB)?")
_BYTE_UNITS = {None: 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

_Section = TypeVar("_Section", bound="Settings")


class SettingsError(LakefeedError):
    """A setting is unknown or its value cannot work: the operator has to change it before anything starts."""


# -- declaration


def setting(  # noqa: PLR0913 - a declaration, by keywords
    default: Any,
    help: str,  # noqa: A002 - the name that click and argparse use
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Iterable[Any] = (),
    required: bool = False,
    per_table: bool = False,
    secret: bool = False,
) -> Any:
    """Declare a field of a section: its default, what it does and in which unit, and the values that can work.

    `minimum` and `maximum` are allowed themselves, `above` is not. `required` forbids empty text. `per_table` settings
    can also be given for single tables. `secret` values are never shown.
    """
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "choices": tuple(choices), "required": required}
    metadata = {"help": help, "limits": limits, "per_table": per_table, "secret": secret}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def table_settings(kind: type[Settings], help: str) -> Any:  # noqa: A002 - see setting()
    """Declare the field of a section that holds settings of single tables: table name -> setting of `kind` -> value."""
    return field(default_factory=dict, metadata={"help": help, "tables_of": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of all sections. Values are checked against their declarations when a section is made."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if "limits" in item.metadata:
                _check_limits(item, getattr(self, item.name))
        self.check()

    def check(self) -> None:
        """Check what a single declaration cannot: rules between settings, and grammars.

        Raises: ValueError, whose message begins with the name of a setting.
        """


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def _check_limits(item: dataclasses.Field[Any], value: Any) -> None:
    """Raise ValueError unless the value is one of the choices and inside the range; NaN is outside of all."""
    name, limits = item.name, item.metadata["limits"]
    shown = "" if item.metadata["secret"] else f": {value}"
    check(not limits["required"] or bool(value), f"{name} must not be empty")
    choices = limits["choices"]
    listed = ", ".join(str(choice) or "empty" for choice in choices)
    check(not choices or value in choices, f"{name} must be one of {listed}{shown}")
    minimum, above, maximum = limits["minimum"], limits["above"], limits["maximum"]
    is_inside = (
        (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
    )
    bounds = {"at least": minimum, "above": above, "at most": maximum}
    words = {word: _shown_bound(name, bound) for word, bound in bounds.items() if bound is not None}
    range_ = " and ".join(f"{word} {bound}" for word, bound in words.items())
    if minimum is not None and maximum is not None:
        range_ = f"between {words['at least']} and {words['at most']}"
    check(is_inside, f"{name} must be {range_}{shown}")


def _shown_bound(name: str, bound: float) -> str:
    is_size = name.endswith("_bytes") and bound >= MIB and bound % MIB == 0
    return f"{bound // MIB} MiB" if is_size else str(bound)


def narrowed(section: Settings, kind: type[_Section], own: Mapping[str, Any]) -> _Section:
    """Return a table's settings: those of the section that `kind` declares, overridden by the table's own."""
    values = {item.name: getattr(section, item.name) for item in dataclasses.fields(kind)}
    return kind(**{**values, **own})


def per_table_types(kind: type[Settings]) -> dict[str, Any]:
    """Return the settings of a section that can be given for single tables, with their types."""
    types_ = setting_types(kind)
    return {item.name: types_[item.name] for item in dataclasses.fields(kind) if item.metadata.get("per_table")}


def setting_types(kind: type[Settings]) -> dict[str, Any]:
    """Return the settings of a section with their types; settings of single tables have the type TableSettingTypes."""
    found = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if "tables_of" in item.metadata:
            found[item.name] = TableSettingTypes(setting_types(item.metadata["tables_of"]))
    return found


@dataclass(frozen=True, slots=True)
class TableSettingTypes:
    """A section of sections: table name or pattern -> setting -> value."""

    settings: Mapping[str, Any]


# -- loading


@dataclass(frozen=True, slots=True)
class Loaded:
    """Sections by name, and per `section.key` where its value came from; defaults are not listed."""

    sections: Mapping[str, Any]
    origins: Mapping[str, str]


def load_sections(
    kinds: Mapping[str, type[Settings] | TableSettingTypes],
    path: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load sections from the file (lakefeed.toml if it exists and no other is named), the environment and flags.

    Flags map `section.key` to a value; None means not given.

    Raises: SettingsError.
    """
    assert kinds.keys() <= set(SECTIONS), "a section that no other command would know"
    loading = _Loading(kinds)
    loading.take_file(path)
    loading.take_environment(environ)
    for key, value in (flags or {}).items():
        if value is not None:
            loading.put(key, value, origin=f"--{key.rpartition('.')[2].replace('_', '-')}")
    return Loaded(loading.build(), loading.origins)


def load_section(path: Path | None, environ: Mapping[str, str], name: str, kind: type[_Section]) -> _Section:
    """Load one section from the file and the environment, or raise SettingsError."""
    section: _Section = load_sections({name: kind}, path, environ).sections[name]
    return section


def variable_name(section: str, name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{ENVIRONMENT_PREFIX}{section.replace('.', '_').upper()}_{name.upper()}"


class _Loading:
    """Values found so far, before each section is checked as a whole."""

    def __init__(self, kinds: Mapping[str, type[Settings] | TableSettingTypes]) -> None:
        self._kinds = kinds
        self._types = {
            f"{section}.{name}": type_
            for section, kind in kinds.items()
            if not isinstance(kind, TableSettingTypes)
            for name, type_ in setting_types(kind).items()
        }
        self._values: dict[str, dict[str, Any]] = {section: {} for section in kinds}
        self.origins: dict[str, str] = {}

    def put(self, key: str, value: Any, *, origin: str) -> None:
        section, _, name = key.rpartition(".")
        self._values[section][name] = value
        self.origins[key] = origin

    def take_file(self, path: Path | None) -> None:
        if path is None and not DEFAULT_FILE.exists():
            return
        path = path or DEFAULT_FILE
        where = str(path)
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"cannot read the configuration: file={path} error={error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"not valid TOML: file={path} error={error}") from error
        for section, values in self._sections_of(document, where):
            kind = self._kinds.get(section)
            if isinstance(kind, TableSettingTypes):
                self._values[section] = _tables_from_file(kind, values, key=section, where=where)
                for table, own in self._values[section].items():
                    self.origins |= {f'{section}."{table}".{name}': where for name in own}
            elif kind is not None:
                for name, value in values.items():
                    key = f"{section}.{name}"
                    if name not in setting_types(kind):
                        raise SettingsError(f"unknown setting: key={key} in={where}{_nearest(key, self._types)}")
                    self.put(key, _from_file(self._types[key], value, key=key, where=where), origin=where)

    def _sections_of(self, document: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        found: dict[str, Any] = {}
        for first, value in document.items():
            is_group = any(section.startswith(f"{first}.") for section in SECTIONS) and isinstance(value, Mapping)
            found |= {f"{first}.{name}": values for name, values in value.items()} if is_group else {first: value}
        for name, values in found.items():
            if not isinstance(values, Mapping):
                # Prefer keys of this bare name: the section was probably forgotten.
                near = [key for key in self._types if key.endswith(f".{name}")] or [*self._types, *SECTIONS]
                raise SettingsError(f"setting outside a section: file={where} key={name}{_nearest(name, near)}")
            if name not in SECTIONS:
                raise SettingsError(f"unknown section: file={where} section={name}{_nearest(name, SECTIONS)}")
            yield name, values

    def take_environment(self, environ: Mapping[str, str]) -> None:
        keys = {variable_name(*key.rsplit(".", 1)): key for key in self._types}
        others = tuple(variable_name(section, "") for section in SECTIONS if section not in self._kinds)
        for variable, text in environ.items():
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable in CREDENTIAL_VARIABLES:
                continue
            if variable in keys:
                key = keys[variable]
                self.put(key, _from_text(self._types[key], text, key=key, where=variable), origin=variable)
            elif not variable.startswith(others):
                raise SettingsError(f"unknown setting: environment={variable}{_nearest(variable, keys)}")

    def build(self) -> dict[str, Any]:
        sections: dict[str, Any] = {}
        for name, kind in self._kinds.items():
            try:
                values = self._values[name]
                sections[name] = values if isinstance(kind, TableSettingTypes) else kind(**values)
            except ValueError as error:
                raise SettingsError(f"{name}.{error}") from error
        return sections


# -- values


def _from_file(type_: Any, value: Any, *, key: str, where: str) -> Any:
    """Convert a TOML value. Numbers of bytes, paths and choices may be text there; other types have their own form."""
    type_ = _without_none(type_)
    if isinstance(type_, TableSettingTypes):
        return _tables_from_file(type_, value, key=key, where=where)
    if typing.get_origin(type_) is tuple and isinstance(value, list):
        return tuple(_from_file(typing.get_args(type_)[0], each, key=key, where=where) for each in value)
    if _is_mapping(type_) and isinstance(value, Mapping):
        inner = typing.get_args(type_)[1]
        return {name: _from_file(inner, each, key=f'{key}."{name}"', where=where) for name, each in value.items()}
    if type(value) is type_:
        return value
    if type_ is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and (type_ in (int, Path) or _is_enum(type_)):
        return _from_text(type_, value, key=key, where=where)
    raise SettingsError(f"wrong type: key={key} in={where} expected={_type_name(type_)} got={type(value).__name__}")


def _tables_from_file(types_: TableSettingTypes, value: Any, *, key: str, where: str) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    if not isinstance(value, Mapping):
        raise SettingsError(f"wrong type: key={key} in={where} expected=section got={type(value).__name__}")
    for table, own in value.items():
        section = f'{key}."{table}"'
        if not isinstance(own, Mapping):
            raise SettingsError(f"wrong type: key={section} in={where} expected=section got={type(own).__name__}")
        for name in own:
            if name not in types_.settings:
                near = _nearest(name, types_.settings)
                raise SettingsError(f"unknown setting of a table: key={section}.{name} in={where}{near}")
        tables[table] = {
            name: _from_file(types_.settings[name], each, key=f"{section}.{name}", where=where)
            for name, each in own.items()
        }
    return tables


def _from_text(type_: Any, text: str, *, key: str, where: str) -> Any:
    type_ = _without_none(type_)
    if typing.get_origin(type_) is tuple:
        inner = typing.get_args(type_)[0]
        items = (item.strip() for item in text.split(","))
        return tuple(_from_text(inner, item, key=key, where=where) for item in items if item)
    try:
        if type_ is bool:
            return _BOOLEANS[text.lower()]
        if type_ is int and (match := _NUMBER_OF_BYTES.fullmatch(text.strip())):
            return int(match[1]) * _BYTE_UNITS[match[2]]
        if type_ in (str, int, float, Path) or _is_enum(type_):
            return type_(text)
    except (KeyError, ValueError):
        pass
    # The value is not repeated: it may be a secret that was given to the wrong key.
    raise SettingsError(f"wrong value: key={key} in={where} expected={_type_name(type_)}")


def _without_none(type_: Any) -> Any:
    if isinstance(type_, types.UnionType) or typing.get_origin(type_) is typing.Union:
        return next(each for each in typing.get_args(type_) if each is not types.NoneType)
    return type_


def _is_mapping(type_: Any) -> bool:
    origin = typing.get_origin(type_)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_enum(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, enum.Enum)


def _type_name(type_: Any) -> str:
    if isinstance(type_, TableSettingTypes) or _is_mapping(type_):
        return "section"
    if typing.get_origin(type_) is tuple:
        return f"list of {_type_name(typing.get_args(type_)[0])}"
    if _is_enum(type_):
        return "|".join(str(member.value) for member in type_)
    return "text" if type_ is str else str(type_.__name__).lower()


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `lakefeed config` lists all"

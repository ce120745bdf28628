"""Settings of the pipeline from the one file and the environment. Owns the reading; sections belong to their parts.

    [pipeline.mirror]                          a section, read into its part's dataclass
    mode = "merge-on-read"                     or LAKEFEED_PIPELINE_MIRROR_MODE=merge-on-read
    [pipeline.mirror.tables."sales.orders"]    a field that maps names to values or to a dataclass; in the file only

The environment wins over the file. A key that nobody knows is an error wherever it stands, because a misspelt setting
must not be a silent default.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lakefeed.contract.errors import LakefeedError

# --- pipeline.settings ------------------------------------------------------------------------------------------------


DEFAULT_FILE = Path("lakefeed.toml")
ENVIRONMENT_PREFIX = "LAKEFEED_PIPELINE_"
TABLE = "pipeline"


class SettingsError(LakefeedError):
    """A setting is unknown or its value cannot work: the operator has to change it before anything starts."""


# Every section there is, so that a misspelt one is found by whichever command reads the file.
SECTIONS = ("spark", "mirror", "maintenance", "backfill", "verification")

_Section = TypeVar("_Section")

_BYTES = re.compile(r"(\d+)\s*(KiB|MiB|GiB)?")
_BYTE_UNITS = {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NAMES = {str: "text", Path: "path"}
_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def load_section(path: Path | None, environ: Mapping[str, str], section: str, kind: type[_Section]) -> _Section:
    """Read one section of the file (lakefeed.toml if there is one and no other is named) and of the environment.

    Raises: SettingsError.
    """
    assert section in SECTIONS, f"unknown to {__name__}: {section}"
    where, document = read_file(path)
    values = _section_of(document, section, where)
    values = _fields_from_file(kind, values, key=f"{TABLE}.{section}", where=where)
    values |= _fields_from_environment(kind, environ, section)
    try:
        return kind(**values)
    except ValueError as error:
        raise SettingsError(f"{TABLE}.{section}.{error}") from error


# -- the file


def read_file(path: Path | None) -> tuple[str, Mapping[str, Any]]:
    """Read the file, whole, with its name for messages.

    Raises: SettingsError.
    """
    if path is None and not DEFAULT_FILE.exists():
        return "", {}
    path = path or DEFAULT_FILE
    try:
        return str(path), tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the configuration: file={path} error={error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"not valid TOML: file={path} error={error}") from error


def _section_of(document: Mapping[str, Any], section: str, where: str) -> Mapping[str, Any]:
    sections = document.get(TABLE, {})
    if not isinstance(sections, Mapping):
        raise SettingsError(f"settings stand in sections such as [{TABLE}.{section}]: file={where} key={TABLE}")
    for name, values in sections.items():
        if name not in SECTIONS:
            raise SettingsError(f"unknown section: file={where} section={TABLE}.{name}{_known(name, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise SettingsError(f"settings stand in sections: file={where} key={TABLE}.{name}")
    found: Mapping[str, Any] = sections.get(section, {})
    return found


def _fields_from_file(kind: type, values: Mapping[str, Any], *, key: str, where: str) -> dict[str, Any]:
    kinds = _field_kinds(kind)
    for name in values:
        if name not in kinds:
            raise SettingsError(f"unknown setting: key={key}.{name} in={where}{_known(name, kinds)}")
    return {name: _from_file(kinds[name], value, key=f"{key}.{name}", where=where) for name, value in values.items()}


def _from_file(kind: Any, value: Any, *, key: str, where: str) -> Any:
    kind = _without_none(kind)
    if typing.get_origin(kind) is not None and issubclass(typing.get_origin(kind), Mapping):
        return _mapping_from_file(typing.get_args(kind)[1], value, key=key, where=where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_from_file(kind, value, key=key, where=where)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_from_file(typing.get_args(kind)[0], each, key=key, where=where) for each in value)
    if kind is Any or (type(value) is kind):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and kind is not bool and kind is not float:
        return _from_text(kind, value, key=key, where=where)
    raise SettingsError(f"wrong type: key={key} in={where} expected={_name_of(kind)} got={type(value).__name__}")


def _mapping_from_file(kind: Any, value: Any, *, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"wrong type: key={key} in={where} expected=section got={type(value).__name__}")
    return {name: _from_file(kind, each, key=f'{key}."{name}"', where=where) for name, each in value.items()}


def _dataclass_from_file(kind: type, value: Any, *, key: str, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise SettingsError(f"wrong type: key={key} in={where} expected=section got={type(value).__name__}")
    try:
        return kind(**_fields_from_file(kind, value, key=key, where=where))
    except ValueError as error:
        raise SettingsError(f"{key}.{error}") from error


# -- the environment


def _fields_from_environment(kind: type, environ: Mapping[str, str], section: str) -> dict[str, Any]:
    known = {variable_of(section, name): name for name in _field_kinds(kind)}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if _section_in(variable) is None:
            raise SettingsError(f"unknown setting: environment={variable}{_known(variable, map(_prefix_of, SECTIONS))}")
        if _section_in(variable) != section:
            continue
        if variable not in known:
            raise SettingsError(f"unknown setting: environment={variable}{_known(variable, known)}")
        name = known[variable]
        found[name] = _from_text(_without_none(_field_kinds(kind)[name]), text, key=variable, where="environment")
    return found


def variable_of(section: str, name: str) -> str:
    """Name the environment variable of a setting."""
    return f"{_prefix_of(section)}{name.upper()}"


def _prefix_of(section: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{section.upper()}_"


def _section_in(variable: str) -> str | None:
    return next((section for section in SECTIONS if variable.startswith(_prefix_of(section))), None)


def _from_text(kind: Any, text: str, *, key: str, where: str) -> Any:
    if kind is str:
        return text
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        items = (item.strip() for item in text.split(","))
        return tuple(_from_text(item_kind, item, key=key, where=where) for item in items if item)
    try:
        return _parser_of(kind)(text)
    except ValueError:
        # The value is not repeated: it may be a secret that stands at the wrong key.
        raise SettingsError(f"wrong value: key={key} in={where} expected={_name_of(kind)}") from None


def _parser_of(kind: Any) -> Callable[[str], Any]:
    if kind is bool:
        return _parse_switch
    if kind is int:
        return _parse_int
    if kind in (float, Path) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return typing.cast("Callable[[str], Any]", kind)
    return _refuse


def _parse_switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError(text)
    return _SWITCHES[text.lower()]


def _parse_int(text: str) -> int:
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return int(text)
    return int(match[1]) * _BYTE_UNITS[match[2]]


def _refuse(text: str) -> Any:
    raise ValueError(text)


# -- kinds


def _field_kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


def _name_of(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {_name_of(typing.get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    if kind in _NAMES:
        return _NAMES[kind]
    return "section in the file" if typing.get_origin(kind) is not None else str(kind.__name__)


def _known(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f" did you mean {near[0]}?" if near else ""
    return f"{meant} known={','.join(names)}"


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the setting is sound."""
    if not condition:
        raise ValueError(message)

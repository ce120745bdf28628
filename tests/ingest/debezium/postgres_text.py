"""Whether a value, as an event brought it, is what PostgreSQL prints. Knows the encodings of the recorded variants."""

from __future__ import annotations

import base64
import json
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

INT64_MAX = 2**63 - 1
_MONTH_US = 2_629_800_000_000
_DAY_US = 86_400_000_000
_SPECIAL_DECIMALS = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
_HSTORE = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)')
_ARRAY = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)')
_INTERVAL_UNITS = {"year": 12, "mon": 1}


def same(value: Any, printed: str | None, type_: str, variant: str) -> bool:
    """Tell whether a value is the printed one, as far as its encoding can keep it."""
    if value is None or printed is None:
        return value is None and printed is None
    if type_.endswith("[]"):
        return _same_list(value, printed, type_.removesuffix("[]"), variant)
    for pattern, compare in _COMPARE:
        if re.fullmatch(pattern, type_):
            return compare(value, printed, variant)
    return value == printed


def _same_list(values: list[Any], printed: str, type_: str, variant: str) -> bool:
    body = re.sub(r"^\[[^]]*\]=", "", printed)[1:-1]
    texts = [
        re.sub(r"\\(.)", r"\1", quoted) if quoted or not bare else (None if bare == "NULL" else bare)
        for quoted, bare in _ARRAY.findall(body)
    ]
    if type_ == "boolean":
        texts = [None if text is None else {"t": "true", "f": "false"}[text] for text in texts]
    return len(values) == len(texts) and all(map(same, values, texts, [type_] * len(texts), [variant] * len(texts)))


def _integer(value: Any, printed: str, _: str) -> bool:
    return isinstance(value, int) and str(value) == printed


def _boolean(value: Any, printed: str, _: str) -> bool:
    return value is (printed in ("true", "1"))


def _float(value: Any, printed: str, _: str) -> bool:
    return repr(float(value)) == repr(float(printed))


def _decimal(value: Any, printed: str, variant: str) -> bool:
    if variant.startswith("v3"):
        return _float(value, printed, variant)
    return _SPECIAL_DECIMALS.get(value, value) == printed


def _money(value: Any, printed: str, variant: str) -> bool:
    return _decimal(value, printed.replace("$", "").replace(",", ""), variant)


def _bits(value: Any, printed: str, variant: str) -> bool:
    if variant == "v1":
        return value == printed
    return int.from_bytes(base64.b64decode(value), "little") == int(printed, 2)


def _varying_bits(value: Any, printed: str, variant: str) -> bool:
    if variant == "v1":
        return int(value or "0", 2) == int(printed or "0", 2)
    return _bits(value, printed or "0", variant)


def _bytes(value: Any, printed: str, variant: str) -> bool:
    given = bytes.fromhex(value) if variant == "v4" else base64.b64decode(value)
    return f"\\x{given.hex()}" == printed


def _padded(value: Any, printed: str, _: str) -> bool:
    return value.rstrip(" ") == printed


def _hstore(value: Any, printed: str, _: str) -> bool:
    given = json.loads(value) if isinstance(value, str) else value
    found = {
        key.replace("\\", ""): None if match.endswith("NULL") else text.replace("\\", "")
        for match, key, text in ((m[0], m[1], m[2] or "") for m in _HSTORE.finditer(printed))
    }
    return given == found


def _point(value: Any, printed: str, _: str) -> bool:
    return [value["x"], value["y"]] == [float(part) for part in printed.strip("()").split(",")]


def _address(value: Any, printed: str, _: str) -> bool:
    return value == printed.removesuffix("/32")


def _date(value: Any, printed: str, _: str) -> bool:
    if isinstance(value, int):
        value = (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    return value.removesuffix("Z") == _iso(printed)


def _timestamp(value: Any, printed: str, variant: str, *, digits: int = 6) -> bool:
    if isinstance(value, int):
        ms = variant.startswith("v3") or digits < 4
        moment = datetime(1970, 1, 1) + timedelta(microseconds=value * 1000 if ms else value)
        known = datetime.fromisoformat(printed)
        if variant.startswith("v3"):
            known = known.replace(microsecond=known.microsecond // 1000 * 1000)
        return moment == known
    return value.removesuffix("Z") == _iso(printed)


def _timestamp_ms(value: Any, printed: str, variant: str) -> bool:
    return _timestamp(value, printed, variant, digits=3)


def _zoned(value: Any, printed: str, _: str) -> bool:
    whole, _, fraction = value.removesuffix("Z").partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}{'.' if fraction else ''}{fraction}" == _iso(printed.replace("+00", ""))


def _iso(printed: str) -> str:
    """Write a printed date or timestamp as ISO 8601 does: 44 BC is the year -43. Infinities stay as they are."""
    if printed in ("infinity", "-infinity"):
        return printed
    year, rest = printed.removesuffix(" BC").replace(" ", "T").split("-", 1)
    if printed.endswith(" BC"):
        year = f"-{int(year) - 1:04}"
    return f"{'+' if len(year) > 4 and year[0] != '-' else ''}{year}-{rest}"


def _time(value: Any, printed: str, variant: str, *, digits: int = 6) -> bool:
    if isinstance(value, str):
        # ISO mode cannot tell the end of a day from its beginning.
        known = "00:00:00" if variant == "v2" and printed == "24:00:00" else printed
        return value.removesuffix("Z") == known
    us = _clock_us(printed)
    if variant.startswith("v3"):
        return value == us // 1000
    return value == (us // 1000 if digits < 4 and variant == "v5" else us)


def _time_ms(value: Any, printed: str, variant: str) -> bool:
    return _time(value, printed, variant, digits=3)


def _clock_us(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    hours, minutes, seconds = text.lstrip("+-").split(":")
    return sign * (int(hours) * 3_600_000_000 + int(minutes) * 60_000_000 + int(Decimal(seconds) * 1_000_000))


def _zoned_time(value: Any, printed: str, _: str) -> bool:
    clock, sign, offset = re.fullmatch(r"([\d:.]+)([+-])([\d:]+)", printed).groups()
    hours, _, minutes = offset.partition(":")
    east = int(f"{sign}1") * (int(hours) * 60 + int(minutes or 0)) * 60_000_000
    return _clock_us(value.removesuffix("Z")) == (_clock_us(clock) - east) % _DAY_US


def _interval(value: Any, printed: str, variant: str) -> bool:
    months, days, us = _printed_interval(printed)
    if variant == "v2":
        return _iso_interval(value) == (months, days, us)
    return value == min(months * _MONTH_US + days * _DAY_US + us, INT64_MAX)


def _printed_interval(text: str) -> tuple[int, int, int]:
    months = days = 0
    for number, unit in re.findall(r"([+-]?\d+) (year|mon|day)", text):
        if unit == "day":
            days = int(number)
        else:
            months += int(number) * _INTERVAL_UNITS[unit]
    clock = re.search(r"[+-]?\d+:\d\d:[\d.]+", text)
    return months, days, _clock_us(clock[0]) if clock else 0


def _iso_interval(text: str) -> tuple[int, int, int]:
    parts = re.fullmatch(r"P(.*)Y(.*)M(.*)DT(.*)H(.*)M(.*)S", text).groups()
    years, months, days, hours, minutes = map(int, parts[:5])
    us = (hours * 60 + minutes) * 60_000_000 + int(Decimal(parts[5]) * 1_000_000)
    return years * 12 + months, days, us


_COMPARE = (
    (r"smallint|integer|bigint|oid|small_id", _integer),
    (r"boolean|bit\(1\)", _boolean),
    (r"numeric.*|cents", _decimal),
    (r"money", _money),
    (r"real|double precision", _float),
    (r"bit\(\d+\)", _bits),
    (r"bit varying.*", _varying_bits),
    (r"bytea", _bytes),
    (r"character\(\d+\)", _padded),
    (r"hstore", _hstore),
    (r"point", _point),
    (r"inet", _address),
    (r"date", _date),
    (r"time without time zone", _time),
    (r"time\(\d\) without time zone", _time_ms),
    (r"time with time zone", _zoned_time),
    (r"timestamp without time zone", _timestamp),
    (r"timestamp\(\d\) without time zone", _timestamp_ms),
    (r"timestamp(\(\d\))? with time zone", _zoned),
    (r"interval", _interval),
)

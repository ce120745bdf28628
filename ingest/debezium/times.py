"""Dates and times from the numbers Debezium sends. Owns their text, and which numbers are no time at all.

Days and ticks count from 1970-01-01 in the proleptic Gregorian calendar, as PostgreSQL and Java do.

    years 1 to 9999                2026-11-16, 05:28:00.123, 2026-11-16T05:28:00.123456    regular
    other years PostgreSQL knows   -0043-03-15 (44 BC), +12026-01-01                       irregular
    overflowed infinities          infinity, -infinity                                     irregular
    any other number               its digits                                              irregular

PostgreSQL's infinite dates and timestamps arrive as numbers that overflowed on their way. The ones below were seen;
none of them is a moment that PostgreSQL can hold, so no real value is mistaken for one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import NamedTuple

MILLIS = 1_000
MICROS = 1_000_000
NANOS = 1_000_000_000

_DAY_S = 86_400
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_CYCLE_YEARS = 400
_CYCLE_DAYS = 146_097

_REGULAR_YEAR_MIN = 1
_REGULAR_YEAR_MAX = 9999
# 4713 BC is PostgreSQL's first year; microseconds in 64 bits end early in the year after the last one here.
_YEAR_MIN = -4712
_YEAR_MAX = 294_246

# Streamed dates wrap at 32 bits, those of a snapshot are the timestamp's infinity in days, cut to 32 bits.
_INFINITE_DAYS = {-2_147_472_692: "infinity", -622_191_234: "infinity", -2_147_472_691: "-infinity"}
_INFINITE_MILLIS = {9_223_372_036_825_200: "infinity", -9_223_372_036_832_400: "-infinity"}
# The same as Debezium writes them in its text modes.
_INFINITE_TEXTS = {
    "-5877611-06-21": "infinity",
    "+292278994-08-16": "infinity",
    "-5877611-06-22": "-infinity",
    "+294247-01-10T04:00:25.2": "infinity",
    "-290308-12-21T19:59:27.6": "-infinity",
}


class Time(NamedTuple):
    """A date or time as text; a regular one is exactly what its type promises."""

    text: str
    regular: bool


def date_of(days: int) -> Time:
    """Write a date."""
    if days in _INFINITE_DAYS:
        return Time(_INFINITE_DAYS[days], regular=False)
    return _day_text(days) or Time(str(days), regular=False)


def timestamp_of(ticks: int, per_second: int) -> Time:
    """Write a timestamp without a zone."""
    millis = ticks * MILLIS // per_second
    if millis in _INFINITE_MILLIS and ticks * MILLIS == millis * per_second:
        return Time(_INFINITE_MILLIS[millis], regular=False)
    days, rest = divmod(ticks, _DAY_S * per_second)
    day = _day_text(days)
    if day is None:
        return Time(str(ticks), regular=False)
    return Time(f"{day.text}T{_clock_text(rest, per_second)}", day.regular)


def time_of(ticks: int, per_second: int) -> Time:
    """Write a time of day. A length that is none, such as 24:00:00 or MySQL's -01:00:00, is irregular."""
    regular = 0 <= ticks < _DAY_S * per_second
    sign = "-" if ticks < 0 else ""
    return Time(sign + _clock_text(abs(ticks), per_second), regular)


def without_zone(text: str, is_regular: Callable[[str], object]) -> Time:
    """Take off the Z that ISO mode puts behind values that have no zone."""
    local = text.removesuffix("Z")
    if local in _INFINITE_TEXTS:
        return Time(_INFINITE_TEXTS[local], regular=False)
    return Time(local, bool(is_regular(local)))


def _day_text(days: int) -> Time | None:
    cycle, rest = divmod(days + _EPOCH_ORDINAL - 1, _CYCLE_DAYS)
    day = date.fromordinal(rest + 1)
    year = day.year + cycle * _CYCLE_YEARS
    if not _YEAR_MIN <= year <= _YEAR_MAX:
        return None
    sign = "-" if year < 0 else "+" if year > _REGULAR_YEAR_MAX else ""
    regular = _REGULAR_YEAR_MIN <= year <= _REGULAR_YEAR_MAX
    return Time(f"{sign}{abs(year):04}-{day.month:02}-{day.day:02}", regular)


def _clock_text(ticks: int, per_second: int) -> str:
    seconds, fraction = divmod(ticks, per_second)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    digits = f"{fraction + per_second}"[1:].rstrip("0")
    return f"{hour:02}:{minute:02}:{second:02}{'.' if digits else ''}{digits}"

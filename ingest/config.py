"""The whole configuration: every part's settings, and where each value came from. Owns the sections and the loading.

Later origins win: defaults, then the TOML file, then LAKEFEED_<SECTION>_<KEY> in the environment, then flags. A key
that nobody knows is an error wherever it stands, because a misspelt setting must not be a silent default. Settings of
single tables stand in the file only, as [tables."sales.orders"]; what they mean is writer/table_settings.py's. Those of
the Spark commands, [pipeline.*], are left to pipeline/settings.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lakefeed.catalog.config import CatalogConfig
from lakefeed.contract.changes import table_name_of
from lakefeed.ingest.admission.addresses import Network, parse_networks
from lakefeed.ingest.admission.auth import CLIENT_TOKEN_VARIABLE, AuthConfig
from lakefeed.ingest.admission.budget import FRAGMENTS_OVERHEAD_BYTES
from lakefeed.ingest.admission.limits import ConnectionLimits, MessageLimits, Patience
from lakefeed.ingest.debezium.events import UNAVAILABLE_VALUE, DebeziumConfig, TableKeys
from lakefeed.settings import SettingsError, check
from lakefeed.storage.config import MIB, StorageConfig
from lakefeed.writer.config import IcebergConfig, LogConfig, WriterConfig
from lakefeed.writer.rows.comments import read_notes
from lakefeed.writer.rows.table_settings import TableSections, per_table_keys

# --- ingest.debezium_settings -----------------------------------------------------------------------------------------
#
# Settings of Debezium's tables. Owns where their keys come from; reading events is ingest/debezium's.


# Tables whose declared keys are kept: far more than one connector has.
DECLARED_KEYS_MAX_TABLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DebeziumSettings:
    """What Debezium does not say about its tables."""

    keys: str = field(
        default="",
        metadata={"why": "key columns per table, as `public.users: id; public.lines: order_id, line`; none are sent"},
    )
    replica_identity_full: str = field(
        default="", metadata={"why": "tables with REPLICA IDENTITY FULL, by commas; only their before-images are whole"}
    )
    unavailable_value: str = field(
        default=UNAVAILABLE_VALUE, metadata={"why": "the connector's unavailable.value.placeholder"}
    )
    messages_table: str = field(
        default="debezium_messages", metadata={"why": "table of logical decoding messages, which belong to none"}
    )

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self, tables: TableSections | None = None, writer: WriterConfig | None = None) -> DebeziumConfig:
        """Read the settings as what reading events needs; keys that they do not name are those declared of tables."""
        full = {name.strip() for name in self.replica_identity_full.split(",") if name.strip()}
        columns = {}
        for entry in filter(None, (part.strip() for part in self.keys.split(";"))):
            table, colon, names = entry.partition(":")
            check(bool(colon and names.strip()), f"keys must be `table: column, column; ...`: entry={entry}")
            columns[table.strip()] = tuple(name.strip() for name in names.split(","))
        return DebeziumConfig(
            tables={
                name: TableKeys(columns=columns.get(name, ()), replica_identity_full=name in full)
                for name in columns.keys() | full
            },
            declared_keys=_declared_keys(tables or TableSections(), writer or WriterConfig()),
            unavailable_value=self.unavailable_value,
            messages_table=self.messages_table,
        )


def _declared_keys(tables: TableSections, writer: WriterConfig) -> Callable[[str], tuple[str, ...]]:
    """Give what finds the `identifier` of a source's table in the sections of single tables."""

    @lru_cache(maxsize=DECLARED_KEYS_MAX_TABLES)
    def find(source_table: str) -> tuple[str, ...]:
        name = table_name_of(source_table, writer.default_namespace)
        declared = tables.settings_for(str(name), writer).declared
        return tuple(each.name for each in declared.fields if read_notes(each.doc).is_key)

    return find


# --- ingest.config ----------------------------------------------------------------------------------------------------


ENVIRONMENT_PREFIX = "LAKEFEED_"
DEFAULT_FILE = Path("lakefeed.toml")
TABLES = "tables"

# The Spark commands read these themselves (pipeline/settings.py); the service only passes over them.
PIPELINE = "pipeline"
PIPELINE_PREFIX = f"{ENVIRONMENT_PREFIX}PIPELINE_"

# A list in the file, by commas in the environment.
TEXTS = tuple[str, ...]

_PORT_MAX = 65_535

# Of what clients may send; 0 switches the other limits off.
_MUST_BE_POSITIVE = (
    *("frame_max_bytes", "event_max_bytes", "queue_max_bytes", "in_flight_max_batches", "memory_max_bytes"),
    *("connections_max", "connection_burst", "message_burst", "http_connections_max", "http_requests_max"),
)

_BYTES = re.compile(r"(\d+)\s*(KiB|MiB|GiB)?")
_BYTE_UNITS = {None: 1, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, the data directory and the node's name."""

    host: str = field(
        default="127.0.0.1",
        metadata={"why": "both listeners bind here; beyond loopback set auth.tokens, or whoever reaches it gets in"},
    )
    http_port: int = field(
        default=8181, metadata={"why": "control plane and Iceberg REST catalog; 0 takes any free port"}
    )
    ws_port: int = field(default=8182, metadata={"why": "data plane, path /ws; 0 takes any free port"})
    data_dir: str = field(default="data", metadata={"why": "log, SQLite catalog and, by default, the warehouse"})
    node_id: str = field(
        default="",
        metadata={"why": "name in progress markers; empty means one made at first start and kept in data_dir"},
    )
    shutdown_deadline_s: float = field(
        default=30.0, metadata={"why": "how long SIGTERM waits for the last flush; what is left stays in the log"}
    )
    stalled_after_s: float = field(
        default=120.0,
        metadata={"why": "/health/ready fails when durable changes are not committed this long after they were due"},
    )

    def __post_init__(self) -> None:
        check(bool(self.host), "host must not be empty")
        for name in ("http_port", "ws_port"):
            check(0 <= getattr(self, name) <= _PORT_MAX, f"{name} must be between 0 and {_PORT_MAX}")
        check(self.shutdown_deadline_s >= 0, "shutdown_deadline_s must not be negative")
        check(self.stalled_after_s > 0, "stalled_after_s must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """What clients may send."""

    frame_max_bytes: int = field(
        default=4 * MIB, metadata={"why": "largest WebSocket message; larger ones close the connection with 1009"}
    )
    event_max_bytes: int = field(default=MIB, metadata={"why": "largest single change; larger ones are refused"})
    queue_max_bytes: int = field(
        default=32 * MIB,
        metadata={"why": "batches waiting for the log, of all clients; beyond it sockets are not read"},
    )
    in_flight_max_batches: int = field(
        default=256, metadata={"why": "unanswered batches per connection; beyond it the socket is not read"}
    )
    memory_max_bytes: int = field(
        default=128 * MIB,
        metadata={"why": "all that is read from sockets and not yet durable; beyond it sockets are not read"},
    )
    compression: bool = field(
        default=False,
        metadata={
            "why": "take permessage-deflate from clients that offer it; costs about five times the processor time, so"
            " for slow lines only. Arrow frames bring a better compression of their own"
        },
    )
    connections_max: int = field(
        default=2_000, metadata={"why": "open connections; each takes about 0.1 MiB, more while a message arrives"}
    )
    connections_per_source_max: int = field(
        default=16,
        metadata={"why": "of one source; one is enough, the others are those that it has lost; 0 = no limit"},
    )
    connections_per_ip_max: int = field(default=200, metadata={"why": "of one client address; 0 = no limit"})
    connections_per_subnet_max: int = field(default=500, metadata={"why": "of one /24, of IPv6 one /64; 0 = no limit"})
    limit_private_ips: bool = field(
        default=False,
        metadata={"why": "count loopback and private addresses for the two limits above; many clients may share one"},
    )
    trusted_proxies: str = field(
        default="",
        metadata={"why": "addresses and networks, by commas, whose CF-Connecting-IP or X-Forwarded-For is believed"},
    )
    connection_rate_per_s: float = field(
        default=500.0, metadata={"why": "new connections a second; opening one costs about a millisecond; 0 = no limit"}
    )
    connection_burst: int = field(
        default=1_000, metadata={"why": "new connections at once, as when all clients come back after a restart"}
    )
    http_connections_max: int = field(
        default=1_000,
        metadata={"why": "open connections of the control plane; each may hold 0.4 MiB that is read ahead"},
    )
    http_requests_max: int = field(
        default=256, metadata={"why": "requests of HTTP ingest that are served at a time; the others wait in line"}
    )
    http_requests_per_ip_max: int = field(
        default=64, metadata={"why": "of these, of one client address, as limit_private_ips has it; 0 = no limit"}
    )
    message_rate_per_s: float = field(
        default=0.0,
        metadata={"why": "messages of one connection, and over HTTP requests of one source, a second; 0 = no limit"},
    )
    message_burst: int = field(
        default=1_000, metadata={"why": "messages of one connection, requests of one source at once, with a rate set"}
    )
    source_bytes_per_s: float = field(
        default=0.0,
        metadata={"why": "bytes of one source a second, over all its connections and requests; 0 = no limit"},
    )
    heartbeat_rate_per_s: float = field(
        default=50.0, metadata={"why": "heartbeats of one connection a second, twice as many at once; 0 = no limit"}
    )
    refusals_max: int = field(
        default=1_000,
        metadata={
            "why": "messages refused for their rate, net of those admitted, before 4002; batches sent again too"
            " early while the log is full, before 4003; 0 = no limit"
        },
    )
    heartbeat_timeout_s: float = field(
        default=60.0,
        metadata={
            "why": "a client that nothing was heard of for so long, not even pongs, is closed with 4000; 0 = never"
        },
    )
    message_timeout_s: float = field(
        default=60.0,
        metadata={"why": "one message must arrive within this; what is begun holds memory of all; 0 = no limit"},
    )
    answers_timeout_s: float = field(
        default=60.0, metadata={"why": "a client that does not read its answers for so long is closed; 0 = never"}
    )
    source_metrics_max: int = field(
        default=100,
        metadata={"why": "sources with metrics of their own, the first by name; the others share the label `other`"},
    )
    load_shedding: bool = field(
        default=True,
        metadata={"why": "refuse batches without X-Priority: high while load is critical (log above 90 %, or below)"},
    )
    shed_delay_s: float = field(
        default=10.0,
        metadata={
            "why": "load is critical when batches wait so long for the log; a fast log stays far below; 0 = never"
        },
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in _MUST_BE_POSITIVE:
                check(value > 0, f"{item.name} must be positive")
            elif not isinstance(value, str):
                check(value >= 0, f"{item.name} must not be negative")
        check(self.event_max_bytes <= self.frame_max_bytes, "event_max_bytes must not be above frame_max_bytes")
        least_bytes = 2 * (self.frame_max_bytes + FRAGMENTS_OVERHEAD_BYTES)
        check(self.memory_max_bytes >= least_bytes, f"memory_max_bytes must be at least {least_bytes}, for two frames")
        self.proxy_networks()

    def connection_limits(self) -> ConnectionLimits:
        """Give the limits on connections."""
        return ConnectionLimits(
            total=self.connections_max,
            per_source=self.connections_per_source_max,
            per_address=self.connections_per_ip_max,
            per_subnet=self.connections_per_subnet_max,
            private_addresses_count=self.limit_private_ips,
            per_s=self.connection_rate_per_s,
            burst=self.connection_burst,
        )

    def message_limits(self) -> MessageLimits:
        """Give the limits on one connection's messages."""
        return MessageLimits(
            per_s=self.message_rate_per_s,
            burst=self.message_burst,
            heartbeats_per_s=self.heartbeat_rate_per_s,
            refusals_max=self.refusals_max,
        )

    def patience(self) -> Patience:
        """Give how long a client may keep us waiting."""
        return Patience(
            heartbeat_s=self.heartbeat_timeout_s, message_s=self.message_timeout_s, answers_s=self.answers_timeout_s
        )

    def proxy_networks(self) -> tuple[Network, ...]:
        """Read the trusted proxies.

        Raises: ValueError.
        """
        try:
            return parse_networks(self.trusted_proxies)
        except ValueError as error:
            raise ValueError(f"trusted_proxies must be addresses and networks: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections."""

    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    debezium: DebeziumSettings = field(default_factory=DebeziumSettings)
    log: LogConfig = field(default_factory=LogConfig)
    writer: WriterConfig = field(default_factory=WriterConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    iceberg: IcebergConfig = field(default_factory=IcebergConfig)
    tables: TableSections = field(default_factory=TableSections)

    def __post_init__(self) -> None:
        self.tables.check(self.writer)
        check(
            self.log.segment_max_bytes >= 4 * self.ingest.frame_max_bytes,
            "log.segment_max_bytes must be at least four times ingest.frame_max_bytes",
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration and, per `section.key`, where its value came from."""

    config: Config
    origins: Mapping[str, str]


@dataclass(slots=True)
class _Given:
    """Values by section as they were found, before they are checked together."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, *, origin: str) -> None:
        section, name = key.split(".")
        self.values.setdefault(section, {})[name] = value
        self.origins[key] = origin


def section_types() -> dict[str, type]:
    """Map each section's name to its dataclass; those of single tables have keys of their own."""
    return {name: kind for name, kind in typing.get_type_hints(Config).items() if name != TABLES}


def known_keys() -> dict[str, type]:
    """Map every `section.key` to the type of its value."""
    return {
        f"{section}.{name}": kind
        for section, cls in section_types().items()
        for name, kind in typing.get_type_hints(cls).items()
    }


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Loaded:
    """Read file, environment and flags (`section.key` -> value, None = not given) into one checked configuration.

    Raises: SettingsError.
    """
    given = _Given()
    _take_file(path, given)
    _take_environment(environ, given)
    for key, value in (flags or {}).items():
        if value is not None:
            given.put(key, value, origin=f"--{key.split('.')[1].replace('_', '-')}")
    return Loaded(_build(given), given.origins)


def _take_file(path: Path | None, given: _Given) -> None:
    if path is None and not DEFAULT_FILE.exists():
        return
    path = path or DEFAULT_FILE
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the configuration: file={path} error={error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"not valid TOML: file={path} error={error}") from error
    for section, table in document.items():
        if section == PIPELINE:
            continue
        if not isinstance(table, dict):
            raise SettingsError(
                f"settings stand in sections: file={path} key={section}{_nearest(section, _as_keys(section))}"
            )
        if section == TABLES:
            _take_tables(table, path, given)
            continue
        if not table and section not in section_types():
            raise SettingsError(f"unknown section: file={path} section={section}{_nearest(section, section_types())}")
        for name, value in table.items():
            key = f"{section}.{name}"
            given.put(key, _checked(key, value, where=str(path)), origin=str(path))


def _take_tables(document: Mapping[str, Any], path: Path, given: _Given) -> None:
    kinds = per_table_keys()
    for pattern, table in document.items():
        if not isinstance(table, dict):
            raise SettingsError(f"settings of tables stand in sections of theirs: file={path} key={TABLES}.{pattern}")
        section = given.tables.setdefault(pattern, {})
        for name, value in table.items():
            key = f'{TABLES}."{pattern}".{name}'
            if name not in kinds:
                raise SettingsError(f"unknown setting of a table: key={key} in={path}{_nearest(name, kinds)}")
            section[name] = _checked_as(kinds[name], key, value, where=str(path))
            given.origins[key] = str(path)


def _take_environment(environ: Mapping[str, str], given: _Given) -> None:
    by_variable = {f"{ENVIRONMENT_PREFIX}{key.replace('.', '_').upper()}": key for key in known_keys()}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CLIENT_TOKEN_VARIABLE:
            continue
        if variable.startswith(PIPELINE_PREFIX):
            continue
        if variable not in by_variable:
            raise SettingsError(f"unknown setting: environment={variable}{_nearest(variable, by_variable)}")
        key = by_variable[variable]
        given.put(key, _parsed(key, text, where=variable), origin=variable)


def _build(given: _Given) -> Config:
    sections = {}
    for section, cls in section_types().items():
        try:
            sections[section] = cls(**given.values.get(section, {}))
        except ValueError as error:
            raise SettingsError(f"{section}.{error}") from error
    try:
        return Config(**sections, tables=TableSections(given.tables))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _checked(key: str, value: Any, *, where: str) -> Any:
    return _checked_as(_kind_of(key, where), key, value, where=where)


def _checked_as(kind: type, key: str, value: Any, *, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, str):
        return _parsed_as(kind, key, value, where=where)
    if kind == TEXTS and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not kind:
        raise SettingsError(f"wrong type: key={key} in={where} expected={_kind_name(kind)} got={type(value).__name__}")
    return value


def _parsed(key: str, text: str, *, where: str) -> Any:
    return _parsed_as(_kind_of(key, where), key, text, where=where)


def _parsed_as(kind: type, key: str, text: str, *, where: str) -> Any:
    if kind is str:
        return text
    try:
        return _PARSERS[kind](text)
    except ValueError as error:
        raise SettingsError(f"wrong value: key={key} in={where} expected={_kind_name(kind)}") from error


def _kind_name(kind: type) -> str:
    return "list of text" if kind == TEXTS else kind.__name__


def _kind_of(key: str, where: str) -> type:
    keys = known_keys()
    if key not in keys:
        raise SettingsError(f"unknown setting: key={key} in={where}{_nearest(key, keys)}")
    return keys[key]


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `lakefeed config` lists all"


def _as_keys(name: str) -> dict[str, type]:
    """Prefer keys of the same bare name: someone forgot the section."""
    keys = known_keys()
    return {key: kind for key, kind in keys.items() if key.endswith(f".{name}")} or keys


def _parse_int(text: str) -> int:
    """Read a whole number, in bytes also as 64MiB."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return int(text)
    return int(match[1]) * _BYTE_UNITS[match[2]]


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _parse_texts(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


_PARSERS: Mapping[Any, Any] = {int: _parse_int, float: float, bool: _parse_bool, TEXTS: _parse_texts}

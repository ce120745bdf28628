"""Configuration of the service: its sections, and the sections of all commands loaded together.

`lakefeed config` and docs/configuration.md show every sentence here, so they are written for operators.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from lakefeed.catalog.config import CatalogConfig
from lakefeed.contract.changes import table_name_of
from lakefeed.ingest.debezium.events import UNAVAILABLE_VALUE, DebeziumConfig, TableKeys
from lakefeed.pipeline.backfill.inputs import BackfillConfig
from lakefeed.pipeline.maintenance.plan import MaintenanceConfig
from lakefeed.pipeline.mirrors.settings import MirrorConfig
from lakefeed.pipeline.spark.session import SessionConfig
from lakefeed.settings import MIB, Settings, SettingsError, TableSettingTypes, check, load_sections, setting
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.config import IcebergConfig, LogConfig, WriterConfig
from lakefeed.writer.rows.comments import read_notes
from lakefeed.writer.rows.table_settings import TableSections, per_table_keys

TABLES = "tables"

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# The characters that RFC 6750 allows in a bearer token. 16 characters of base64 are 96 bits: too many to guess.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
TOKEN_MIN_CHARS = 16
TOKEN_MAX_CHARS = 4096

# What a frame takes in memory besides its bytes, so that a flood of empty frames is counted too. websockets limits a
# message to 4,096 fragments.
FRAME_OVERHEAD_BYTES = 256
FRAGMENTS_OVERHEAD_BYTES = 4096 * FRAME_OVERHEAD_BYTES

# Tables whose declared keys are cached: far more than one Debezium connector has.
DECLARED_KEYS_MAX_TABLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Settings):
    """Addresses, the data directory and the node's name."""

    host: str = setting(
        "127.0.0.1",
        "Address that both listeners bind to. Beyond loopback, set `auth.tokens`: without tokens every client that"
        " reaches the port is admitted.",
        required=True,
    )
    http_port: int = setting(
        8181, "Port of the control plane and the Iceberg REST catalog. 0 takes a free port.", minimum=0, maximum=65_535
    )
    ws_port: int = setting(
        8182, "Port of the data plane, with the path `/ws`. 0 takes a free port.", minimum=0, maximum=65_535
    )
    data_dir: str = setting("data", "Directory of the log, the SQLite catalog and, by default, the warehouse.")
    node_id: str = setting(
        "",
        "Name of this node in progress markers. Empty means a name that the first start makes and keeps in `data_dir`.",
    )
    shutdown_deadline_s: float = setting(
        30.0, "Time in seconds that SIGTERM waits for the last flush. What is left stays in the log.", minimum=0
    )
    stalled_after_s: float = setting(
        120.0, "Time in seconds after which an overdue commit makes `/health/ready` fail.", above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig(Settings):
    """Bearer tokens of clients."""

    tokens: tuple[str, ...] = setting(
        (),
        "Bearer tokens of at least 16 characters. Each one admits to `/ws`, HTTP and the catalog. Without tokens, no"
        " authentication is required.",
        secret=True,
    )
    tokens_file: str = setting(
        "", "File of further tokens, one per line, read at startup. Lines that begin with # are comments."
    )

    def check(self) -> None:
        """Check that clients can send the tokens, and that the tokens are hard to guess."""
        _check_tokens(self.tokens, "tokens")


def _check_tokens(tokens: Iterable[str], name: str) -> None:
    characters = "letters, digits and -._~+/ (with = at its end)"
    for number, token in enumerate(tokens, start=1):
        check(bool(_TOKEN.fullmatch(token)), f"{name}: a token must be {characters}: number={number}")
        has, size = f"number={number} has={len(token)}", f"{TOKEN_MIN_CHARS} to {TOKEN_MAX_CHARS}"
        has_size = TOKEN_MIN_CHARS <= len(token) <= TOKEN_MAX_CHARS
        check(has_size, f"{name}: a token must have {size} characters: {has}")


def load_tokens(config: AuthConfig) -> tuple[str, ...]:
    """Return the tokens of the settings and of the file.

    Raises: SettingsError, also for a file without tokens, because that would leave the service open.
    """
    if not config.tokens_file:
        return config.tokens
    try:
        lines = Path(config.tokens_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"auth.tokens_file cannot be read: file={config.tokens_file} error={error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise SettingsError(f"auth.tokens_file has no token in it: file={config.tokens_file}")
    try:
        _check_tokens(found, "auth.tokens_file")
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return (*config.tokens, *found)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig(Settings):
    """Limits on what clients send."""

    frame_max_bytes: int = setting(
        4 * MIB, "Largest WebSocket message, in bytes. A larger one closes the connection with 1009.", minimum=1
    )
    event_max_bytes: int = setting(MIB, "Largest single change, in bytes. A larger one is rejected.", minimum=1)
    queue_max_bytes: int = setting(
        32 * MIB,
        "Bytes of all batches that wait for the log. When it is full, sockets are not read.",
        minimum=1,
    )
    in_flight_max_batches: int = setting(
        256, "Batches of one connection without a reply. At this number its socket is not read.", minimum=1
    )
    memory_max_bytes: int = setting(
        128 * MIB,
        "Memory for data read from sockets that is not yet durable, in bytes. When it is full, sockets are not read.",
        minimum=1,
    )
    compression: bool = setting(
        False,
        "Accept permessage-deflate from clients that offer it. It takes about five times the processor time, so it is"
        " for slow networks only. Arrow frames have a better compression of their own.",
    )
    connections_max: int = setting(
        2_000,
        "Maximum number of WebSocket connections. Each takes about 0.1 MiB, more while a message arrives.",
        minimum=1,
    )
    connections_per_source_max: int = setting(
        16, "Maximum number of connections of one source, which needs one. 0 means no limit.", minimum=0
    )
    connections_per_ip_max: int = setting(
        200, "Maximum number of connections of one client address. 0 means no limit.", minimum=0
    )
    connections_per_subnet_max: int = setting(
        500, "Maximum number of connections of one /24, or /64 of IPv6. 0 means no limit.", minimum=0
    )
    limit_private_ips: bool = setting(
        False,
        "Apply the limits per address and subnet to loopback and private addresses, which many clients may share.",
    )
    trusted_proxies: str = setting(
        "",
        "Addresses and networks of proxies, separated by commas, whose CF-Connecting-IP or X-Forwarded-For header is"
        " trusted.",
    )
    connection_rate_per_s: float = setting(
        500.0, "New connections per second. Each costs about a millisecond. 0 means no limit.", minimum=0
    )
    connection_burst: int = setting(
        1_000, "New connections at once, as when all clients reconnect after a restart.", minimum=1
    )
    http_connections_max: int = setting(
        1_000, "Maximum number of HTTP connections. Each may hold 0.4 MiB that is read ahead.", minimum=1
    )
    http_requests_max: int = setting(
        256, "Maximum number of HTTP ingest requests that are served at a time. Further ones wait.", minimum=1
    )
    http_requests_per_ip_max: int = setting(
        64, "The same for one client address, subject to `limit_private_ips`. 0 means no limit.", minimum=0
    )
    message_rate_per_s: float = setting(
        0.0,
        "Messages per second of one connection, and HTTP requests per second of one source. 0 means no limit.",
        minimum=0,
    )
    message_burst: int = setting(
        1_000, "With `message_rate_per_s`: messages or requests that may come at once.", minimum=1
    )
    source_bytes_per_s: float = setting(
        0.0, "Bytes per second of one source, over all its connections and requests. 0 means no limit.", minimum=0
    )
    heartbeat_rate_per_s: float = setting(
        50.0, "Heartbeats per second of one connection, twice as many at once. 0 means no limit.", minimum=0
    )
    refusals_max: int = setting(
        1_000,
        "Messages above the rate, and batches sent again too early while the log is full, net of accepted batches,"
        " before a connection is closed with 4002. 0 means no limit.",
        minimum=0,
    )
    heartbeat_timeout_s: float = setting(
        60.0,
        "Time in seconds without any frame of a client, pongs included, after which it is closed with 4000. 0 means"
        " never.",
        minimum=0,
    )
    message_timeout_s: float = setting(
        60.0,
        "Time in seconds within which one message must arrive, because a partial one holds shared memory. 0 means no"
        " limit.",
        minimum=0,
    )
    reply_timeout_s: float = setting(
        60.0, "Time in seconds after which a client that does not read its replies is closed. 0 means never.", minimum=0
    )
    source_metrics_max: int = setting(
        100, "Number of sources with metrics of their own, by name. The others share the label `other`.", minimum=0
    )
    load_shedding: bool = setting(
        True,
        "Reject batches without `X-Priority: high` while load is critical: the log is above 90 % or batches wait too"
        " long for it.",
    )
    shed_delay_s: float = setting(
        10.0, "Time in seconds that batches wait for the log at which load is critical. 0 means never.", minimum=0
    )

    def check(self) -> None:
        """Check that memory holds two frames, and the list of proxies."""
        check(self.event_max_bytes <= self.frame_max_bytes, "event_max_bytes must not be above frame_max_bytes")
        least_bytes = 2 * (self.frame_max_bytes + FRAGMENTS_OVERHEAD_BYTES)
        check(self.memory_max_bytes >= least_bytes, f"memory_max_bytes must be at least {least_bytes}, for two frames")
        self.proxy_networks()

    def proxy_networks(self) -> tuple[Network, ...]:
        """Return the trusted proxies.

        Raises: ValueError.
        """
        try:
            parts = (part.strip() for part in self.trusted_proxies.split(","))
            return tuple(ipaddress.ip_network(part) for part in parts if part)
        except ValueError as error:
            raise ValueError(f"trusted_proxies must be addresses and networks: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DebeziumSettings(Settings):
    """What Debezium's events do not tell about their tables."""

    keys: str = setting(
        "", "Key columns per table, such as `public.users: id; public.lines: order_id, line`. Events do not name them."
    )
    replica_identity_full: str = setting(
        "", "Tables with REPLICA IDENTITY FULL, separated by commas. Only their before-images are complete."
    )
    unavailable_value: str = setting(UNAVAILABLE_VALUE, "The connector's `unavailable.value.placeholder`.")
    messages_table: str = setting("debezium_messages", "Table for logical decoding messages, which belong to no table.")

    def check(self) -> None:
        """Check the grammar of `keys`."""
        self.to_config()

    def to_config(self, tables: TableSections | None = None, writer: WriterConfig | None = None) -> DebeziumConfig:
        """Return what reading events needs. The keys of other tables are those declared in `tables`.

        Raises: ValueError.
        """
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
    @lru_cache(maxsize=DECLARED_KEYS_MAX_TABLES)
    def find(source_table: str) -> tuple[str, ...]:
        name = table_name_of(source_table, writer.default_namespace)
        declared = tables.settings_for(str(name), writer).declared
        return tuple(each.name for each in declared.fields if read_notes(each.doc).is_key)

    return find


# What a commit has for a source at most, twice: nodes may exceed the limit together (TableLimit).
SOURCE_ROOM_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections of the service."""

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
        check(
            bool(self.iceberg.uri) or self.catalog.request_max_bytes >= SOURCE_ROOM_BYTES * self.writer.sources_max,
            f"catalog.request_max_bytes must be at least {SOURCE_ROOM_BYTES} times writer.sources_max",
        )


# The service's own sections, and those of the Spark commands. The service loads both, so that it reports a misspelled
# setting of either.
SERVICE_SECTIONS: Mapping[str, Any] = {
    each.name: each.default_factory for each in fields(Config) if each.name != TABLES
}
PIPELINE_SECTIONS: Mapping[str, type[Settings]] = {
    "pipeline.spark": SessionConfig,
    "pipeline.mirror": MirrorConfig,
    "pipeline.maintenance": MaintenanceConfig,
    "pipeline.backfill": BackfillConfig,
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The service's configuration, all sections by name, and per `section.key` where its value came from."""

    config: Config
    sections: Mapping[str, Any]
    origins: Mapping[str, str]


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Load and check all sections from the file, the environment and flags (`section.key` -> value).

    Raises: SettingsError.
    """
    kinds: dict[str, type[Settings] | TableSettingTypes]
    kinds = {**SERVICE_SECTIONS, **PIPELINE_SECTIONS, TABLES: TableSettingTypes(per_table_keys())}
    loaded = load_sections(kinds, path, environ, flags)
    own = {name: loaded.sections[name] for name in SERVICE_SECTIONS}
    try:
        config = Config(**own, tables=TableSections(loaded.sections[TABLES]))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return LoadedConfig(config, loaded.sections, loaded.origins)

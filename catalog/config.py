"""Settings of the catalog, and the warehouse that the service passes in from its storage settings."""

from __future__ import annotations

from dataclasses import dataclass

from lakefeed.settings import MIB, Settings, check, setting
from lakefeed.storage.config import CLOUD_SCHEMES, StorageConfig

MEMORY_DATABASE = "memory:"
POSTGRES_SCHEMES = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig(Settings):
    """The Iceberg REST catalog."""

    warehouse_name: str = setting(
        "lakefeed",
        "Name that clients may send as `warehouse`. They may also send its location, or nothing.",
        required=True,
    )
    database: str = setting(
        "",
        "Database of names and metadata pointers. Empty means a SQLite file in the data directory;"
        " `postgresql://user@host/name` can be shared by several catalog processes; `memory:` is lost at the end.",
        secret=True,
    )
    database_timeout_s: float = setting(
        30.0, "Time limit of one PostgreSQL request in seconds, including the wait for a connection.", above=0
    )
    request_max_bytes: int = setting(
        16 * MIB, "Largest request body, in bytes. A commit of 10,000 snapshots has about 6 MiB.", minimum=1
    )
    metadata_max_bytes: int = setting(
        256 * MIB, "Largest metadata file that is read, in bytes after decompression.", minimum=1
    )
    metadata_cache_bytes: int = setting(
        128 * MIB,
        "Memory for parsed metadata, in bytes. A table with 1,000 snapshots takes about 3 MiB.",
        minimum=0,
    )
    response_cache_bytes: int = setting(
        64 * MIB,
        "Memory for responses to table loads, plain and gzipped, in bytes. 0 builds every response anew.",
        minimum=0,
    )
    page_default_items: int = setting(1000, "Names per page of a list when the client asks for no size.", minimum=1)
    page_max_items: int = setting(10_000, "Maximum number of names per page of a list.")
    commit_queue_max: int = setting(
        64, "Maximum number of commits that wait for one table. Further ones get 429.", minimum=1
    )
    idempotency_lifetime_s: int = setting(
        1800, "Time in seconds for which the outcome of a request with an Idempotency-Key is kept.", minimum=1
    )
    idempotency_keys_max: int = setting(
        1_000_000,
        "Maximum number of idempotency keys, at about 300 bytes each. Beyond it the oldest are forgotten early.",
        minimum=1,
    )
    plan_wait_s: float = setting(
        30.0,
        "Time in seconds that a request waits for its scan plan. After it the client gets the plan's id and has to ask"
        " again, which PyIceberg cannot.",
        minimum=0,
    )
    plan_page_files: int = setting(10_000, "Files per response of scan planning. Bounds its memory.", minimum=1)
    plan_lifetime_s: float = setting(3600.0, "Time in seconds that a scan plan is kept after its last use.", above=0)
    plans_max: int = setting(1000, "Maximum number of scan plans that are kept. Further ones get 429.", minimum=1)
    plans_held_max_files: int = setting(
        200_000,
        "Maximum number of manifests and delete files that all scan plans keep in memory, at about 1 KiB each.",
        minimum=1,
    )
    storage_timeout_s: float = setting(
        30.0, "Time limit of one read or write of a metadata file in seconds, including retries.", above=0
    )
    allow_any_location: bool = setting(
        False, "Let clients create and register tables outside the warehouse. For trusted clients only."
    )
    verify_metadata_file: bool = setting(
        False,
        "Check at every load that the metadata file still exists on S3, although its content is cached. Costs one"
        " request per load. Local files are always checked.",
    )

    def check(self) -> None:
        """Check the kind of database and the page sizes."""
        check(
            self.database in ("", MEMORY_DATABASE) or self.database.startswith(POSTGRES_SCHEMES),
            f"database must be empty, {MEMORY_DATABASE} or begin with {POSTGRES_SCHEMES[0]}",
        )
        check(self.page_max_items >= self.page_default_items, "page_max_items must be at least page_default_items")


@dataclass(frozen=True, slots=True)
class Warehouse:
    """Where tables live, without a slash at the end, and how that storage is reached."""

    storage: StorageConfig

    def __post_init__(self) -> None:
        check(
            self.location.startswith(("file:///", "s3://", *CLOUD_SCHEMES)),
            f"warehouse must start with file:///, s3://, gs:// or abfss://: warehouse={self.location}",
        )
        check(not self.location.endswith("/"), f"warehouse must not end in a slash: warehouse={self.location}")

    @property
    def location(self) -> str:
        """Return where tables live."""
        return self.storage.warehouse

    @property
    def is_local(self) -> bool:
        """Return whether files are on a local disk."""
        return self.location.startswith("file:")

    def client_config(self) -> dict[str, str]:
        """Return how clients reach the files, by the names that Java (client.region) and others (s3.region) read."""
        if self.location.startswith("gs://"):
            config = {"gcs.service.host": self.storage.gcs_endpoint}
        elif self.location.startswith("s3://"):
            config = {
                "s3.endpoint": self.storage.s3_endpoint,
                "s3.path-style-access": "true" if self.storage.s3_path_style else "",
                "client.region": self.storage.s3_region,
                "s3.region": self.storage.s3_region,
            }
        else:
            config = {}
        return {name: value for name, value in config.items() if value}

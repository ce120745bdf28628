"""Settings of the catalog. Owns defaults, units and their checks; reading files and the environment is the caller's.

CatalogConfig is what an operator may change; each field's `why` is written for them. Warehouse is what the service
passes in from its own settings: where files live and how their storage is reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lakefeed.settings import check
from lakefeed.storage.config import CLOUD_SCHEMES, StorageConfig

MIB = 1024 * 1024

MEMORY_DATABASE = "memory:"
POSTGRES_SCHEMES = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """The REST catalog."""

    warehouse_name: str = field(
        default="lakefeed",
        metadata={"why": "name that clients may send as `warehouse`; none and the warehouse's location also work"},
    )
    database: str = field(
        default="",
        metadata={
            "why": "names and pointers: empty means a SQLite file in the data directory; postgresql://user@host/name"
            " lets several catalog processes share one; memory: forgets everything at the end",
            "secret": True,
        },
        repr=False,
    )
    database_timeout_s: float = field(
        default=30.0, metadata={"why": "one request to PostgreSQL, waiting for a connection included"}
    )
    request_max_bytes: int = field(
        default=16 * MIB, metadata={"why": "largest request body; a commit of 10,000 snapshots is about 6 MiB"}
    )
    metadata_max_bytes: int = field(
        default=256 * MIB, metadata={"why": "largest metadata file that is read, unpacked; bounds one load's memory"}
    )
    metadata_cache_bytes: int = field(
        default=128 * MIB,
        metadata={"why": "memory for parsed metadata; a table with 1,000 snapshots takes about 3 MiB"},
    )
    answer_cache_bytes: int = field(
        default=64 * MIB,
        metadata={"why": "memory for finished answers to loads, plain and gzipped; 0 builds each anew"},
    )
    page_default_items: int = field(
        default=1000, metadata={"why": "names per page of a list when the client pages without a size"}
    )
    page_max_items: int = field(default=10_000, metadata={"why": "most names per page, whatever size is asked for"})
    commit_queue_max: int = field(
        default=64, metadata={"why": "commits that may wait for one table; further ones are answered 429"}
    )
    idempotency_lifetime_s: int = field(
        default=1800,
        metadata={"why": "how long a request that is repeated with its Idempotency-Key is told what came of the first"},
    )
    idempotency_keys_max: int = field(
        default=1_000_000,
        metadata={"why": "keys that are remembered; beyond it the oldest are forgotten early. About 300 bytes each"},
    )
    plan_wait_s: float = field(
        default=30.0,
        metadata={
            "why": "how long a request to plan a scan waits for it; a plan that takes longer is answered with its id,"
            " to ask again, which PyIceberg cannot"
        },
    )
    plan_page_files: int = field(
        default=10_000, metadata={"why": "files that are looked at for one answer of scan planning; bounds its memory"}
    )
    plan_lifetime_s: float = field(
        default=3600.0, metadata={"why": "how long a scan plan is kept after its last use, for its tasks to be fetched"}
    )
    plans_max: int = field(
        default=1000, metadata={"why": "scan plans that are kept at once; further ones are answered 429"}
    )
    plans_held_max_files: int = field(
        default=200_000,
        metadata={"why": "manifests and delete files that all scan plans together keep in memory, about 1 KiB each"},
    )
    storage_timeout_s: float = field(
        default=30.0,
        metadata={"why": "one read or write of a metadata file, retries included; a hung store must not hang commits"},
    )
    allow_any_location: bool = field(
        default=False,
        metadata={"why": "let clients place and register tables outside the warehouse; for trusted clients only"},
    )
    verify_metadata_file: bool = field(
        default=False,
        metadata={
            "why": "look on S3, at every load, whether the metadata file still exists, though its content is cached;"
            " one more request each. Local files are always looked at"
        },
    )

    def __post_init__(self) -> None:
        check(
            self.database in ("", MEMORY_DATABASE) or self.database.startswith(POSTGRES_SCHEMES),
            f"database must be empty, {MEMORY_DATABASE} or begin with {POSTGRES_SCHEMES[0]}",
        )
        check(self.database_timeout_s > 0, "database_timeout_s must be positive")
        check(bool(self.warehouse_name), "warehouse_name must not be empty")
        check(self.request_max_bytes > 0, "request_max_bytes must be positive")
        check(self.metadata_max_bytes > 0, "metadata_max_bytes must be positive")
        check(self.metadata_cache_bytes >= 0, "metadata_cache_bytes must not be negative")
        check(self.answer_cache_bytes >= 0, "answer_cache_bytes must not be negative")
        check(self.page_default_items > 0, "page_default_items must be positive")
        check(self.page_max_items >= self.page_default_items, "page_max_items must be at least page_default_items")
        check(self.commit_queue_max > 0, "commit_queue_max must be positive")
        check(self.idempotency_lifetime_s > 0, "idempotency_lifetime_s must be positive")
        check(self.idempotency_keys_max > 0, "idempotency_keys_max must be positive")
        check(self.plan_wait_s >= 0, "plan_wait_s must not be negative")
        check(self.plan_page_files > 0, "plan_page_files must be positive")
        check(self.plan_lifetime_s > 0, "plan_lifetime_s must be positive")
        check(self.plans_max > 0, "plans_max must be positive")
        check(self.plans_held_max_files > 0, "plans_held_max_files must be positive")
        check(self.storage_timeout_s > 0, "storage_timeout_s must be positive")


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

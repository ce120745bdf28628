"""The SQL schema of the PostgreSQL store. Owns its version and the way there.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level, NULL at the top) | properties (JSON)
    entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' where not known)
    outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms

Migrations run forward only, and only when asked to, in a transaction and under a lock that all processes take; a new
database goes through all of them at its first open.
"""

from __future__ import annotations

from typing import Any

from catalog.store.protocol import check_version

# Statements that lead from each version to the next; a new database goes through all of them.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE namespaces (
            name TEXT COLLATE "C" PRIMARY KEY,
            parent TEXT COLLATE "C" REFERENCES namespaces (name),
            properties TEXT NOT NULL
        )""",
        "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
        """CREATE TABLE entries (
            namespace TEXT COLLATE "C" NOT NULL REFERENCES namespaces (name),
            name TEXT COLLATE "C" NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            metadata_location TEXT NOT NULL,
            PRIMARY KEY (namespace, name)
        )""",
    ),
    (
        """CREATE TABLE outcomes (
            idempotency_key TEXT COLLATE "C" PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            outcome TEXT NOT NULL,
            recorded_ms BIGINT NOT NULL
        )""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
    (
        "ALTER TABLE entries ADD COLUMN digest TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE entries ADD COLUMN table_uuid TEXT NOT NULL DEFAULT ''",
    ),
)
SCHEMA_VERSION = len(_MIGRATIONS)

# Any number, as long as all processes take the same: who migrates, the others wait.
_MIGRATION_LOCK = 5_213_207_411


async def prepare_schema(db: Any) -> int:
    """Make the schema of a new database; return the version."""
    await _lock_schema(db)
    if await db.fetchval("SELECT to_regclass('lakefeed_catalog.catalog_schema')") is None:
        await migrate(db)
    version: int = await db.fetchval("SELECT version FROM catalog_schema")
    return version


async def migrate(db: Any) -> int:
    """Go through the migrations that a database has not seen; return the version that it had."""
    await _lock_schema(db)
    await db.execute("CREATE SCHEMA IF NOT EXISTS lakefeed_catalog")
    await db.execute("CREATE TABLE IF NOT EXISTS catalog_schema (version INTEGER NOT NULL)")
    version: int = await db.fetchval("SELECT version FROM catalog_schema") or 0
    if version > SCHEMA_VERSION:
        check_version(version, SCHEMA_VERSION)
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            await db.execute(statement)
    await db.execute("DELETE FROM catalog_schema")
    await db.execute("INSERT INTO catalog_schema VALUES ($1)", SCHEMA_VERSION)
    return version


async def _lock_schema(db: Any) -> None:
    await db.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)

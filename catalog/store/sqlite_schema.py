"""The SQL schema of the SQLite store. Owns its version and the way there.

    namespaces  name (levels joined by 0x1F) | parent (all but the last level, '' at the top) | properties (JSON)
    entries     namespace | name | kind (Table or View) | metadata_location | digest | table_uuid ('' where not known)
    outcomes    idempotency_key | fingerprint | outcome (JSON) | recorded_ms

Migrations run forward only, and only when asked to; a new file goes through all of them at its first open.
"""

from __future__ import annotations

import sqlite3

from catalog.store.protocol import check_version

# Statements that lead from each version to the next; a new file goes through all of them.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE namespaces (
        name TEXT NOT NULL PRIMARY KEY,
        parent TEXT NOT NULL,
        properties TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
        "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
        """CREATE TABLE tables (
        namespace TEXT NOT NULL REFERENCES namespaces (name),
        name TEXT NOT NULL,
        metadata_location TEXT NOT NULL,
        PRIMARY KEY (namespace, name)
    ) STRICT, WITHOUT ROWID""",
    ),
    (
        "ALTER TABLE tables RENAME TO entries",
        "ALTER TABLE entries ADD COLUMN kind TEXT NOT NULL DEFAULT 'Table'",
    ),
    (
        """CREATE TABLE outcomes (
        idempotency_key TEXT NOT NULL PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        outcome TEXT NOT NULL,
        recorded_ms INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
    (
        "ALTER TABLE entries ADD COLUMN digest TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE entries ADD COLUMN table_uuid TEXT NOT NULL DEFAULT ''",
    ),
)
SCHEMA_VERSION = len(_MIGRATIONS)


def prepare_schema(db: sqlite3.Connection) -> int:
    """Make the schema of a new file; return the version."""
    if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'catalog_schema'").fetchone() is None:
        migrate(db)
    (version,) = db.execute("SELECT version FROM catalog_schema").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection) -> int:
    """Go through the migrations that a file has not seen; return the version that it had."""
    db.execute("CREATE TABLE IF NOT EXISTS catalog_schema (version INTEGER NOT NULL) STRICT")
    row = db.execute("SELECT version FROM catalog_schema").fetchone()
    version = 0 if row is None else int(row[0])
    if version > SCHEMA_VERSION:
        check_version(version, SCHEMA_VERSION)
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            db.execute(statement)
    db.execute("DELETE FROM catalog_schema")
    db.execute("INSERT INTO catalog_schema VALUES (?)", (SCHEMA_VERSION,))
    return version

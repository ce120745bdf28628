"""The Iceberg REST catalog: HTTP in, table metadata out. Clients reach it over HTTP only, even inside one process.

    request -> routes -> service -> store       names and pointers: SQLite, PostgreSQL or memory
                  |         |  |
                  |         |  +--> files       metadata documents in the warehouse
                  |         +-> metadata        pure: requirements, updates, the next document
                  +-> planning                  scan plans: manifests, filters, tasks

app.py builds the parts and is what hosts import; config.py has the settings. Imports go down this list: app, routes,
planning, service, store, metadata and names, json_fields, config and errors.
"""

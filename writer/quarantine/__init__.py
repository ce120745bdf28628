"""Commands on the quarantine: list, show, replay and drop changes that their tables refused.

    tables/quarantine.py  --rows-->  <namespace>.lakefeed_quarantine  --store.py: open entries-->  commands
                                                                      --replay.py: changes-->      their tables

Commands run beside a service, through the catalog. Only `ingest.cli` imports this package.
"""

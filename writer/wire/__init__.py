"""Wire formats: batches of changes as clients send them and as the log keeps them. Pure.

    JSON batch   json_batch: envelope and changes; rows stay undecoded
    Arrow frame  arrow_ipc bounds what the stream claims -> arrow_frame checks it -> arrow_types: columns and values

Used by ingest (admission) and by writer.rows (decoding), so that both sides of the log agree on the format.
Imports the shared packages only.
"""

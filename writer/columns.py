"""Names of the columns that Lakefeed adds to a row. Owns the names and their order.

Standard library only: the Spark pipeline imports it on clusters where nothing else of the project is installed.
"""

SEQUENCE = "_cdc_sequence"
TIMESTAMP = "_cdc_timestamp"
OPERATION = "_cdc_operation"
ROW_ID = "_cdc_row_id"
SOURCE = "_cdc_source"
INGESTED_AT = "_cdc_ingested_at"
BEFORE = "_cdc_before"
UNCHANGED = "_cdc_unchanged"
METADATA = "_cdc_metadata"
RESCUED = "_cdc_rescued"
PARTITION = "_cdc_partition"
# Null for epoch 0. Sequences restart with an epoch: the order of a source's changes is that of (epoch, sequence).
EPOCH = "_cdc_epoch"

# Every column that starts so belongs to Lakefeed; a row that brings such a column itself has it rescued.
RESERVED_PREFIX = "_cdc_"

ALL = (
    *(SEQUENCE, TIMESTAMP, OPERATION, ROW_ID, SOURCE, INGESTED_AT),
    *(BEFORE, UNCHANGED, METADATA, RESCUED, PARTITION, EPOCH),
)

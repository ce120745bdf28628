"""Settings of object storage, for writer and catalog. Imports no client library."""

from __future__ import annotations

from dataclasses import dataclass, field

from lakefeed.settings import check

MIB = 1024 * 1024

S3_CHECKSUMS = ("crc32", "md5", "none")
S3_SCHEMES = ("s3://", "s3a://", "s3n://")
# Google Cloud Storage and Azure.
CLOUD_SCHEMES = ("gs://", "abfss://", "abfs://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Where data and metadata files live. Credentials left empty come from each cloud's usual chain."""

    warehouse: str = field(
        default="",
        metadata={
            "why": "s3://bucket/path, gs://, abfss:// (see storage.md) or a local directory;"
            " empty means `warehouse` inside the data directory"
        },
    )
    part_bytes: int = field(
        default=8 * MIB, metadata={"why": "part size of uploads in parts; larger objects than this use them"}
    )
    request_timeout_s: float = field(
        default=60.0, metadata={"why": "one try of one storage request; a hung store must not hang us"}
    )
    s3_endpoint: str = field(default="", metadata={"why": "endpoint of R2, MinIO or SeaweedFS; empty means AWS"})
    s3_region: str = field(
        default="us-east-1", metadata={"why": "region that requests are signed for; R2 takes `auto`"}
    )
    s3_path_style: bool = field(
        default=False, metadata={"why": "bucket in the path, not the host; most S3-alikes want it"}
    )
    s3_checksum: str = field(
        default="crc32",
        metadata={"why": f"of every body, compared by the store: {', '.join(S3_CHECKSUMS)}; md5 for S3-alikes of old"},
    )
    s3_profile: str = field(default="", metadata={"why": "profile of the AWS configuration files to take keys from"})
    s3_access_key_id: str = field(default="", metadata={"why": "empty means the AWS credential chain"})
    s3_secret_access_key: str = field(
        default="", repr=False, metadata={"why": "empty means the AWS credential chain", "secret": True}
    )
    s3_session_token: str = field(
        default="", repr=False, metadata={"why": "of temporary keys, which are then not renewed", "secret": True}
    )
    gcs_service_account: str = field(
        default="", metadata={"why": "path of a key file; empty means Google's application default credentials"}
    )
    gcs_endpoint: str = field(default="", metadata={"why": "another endpoint than Google's, for private access"})
    azure_account_key: str = field(
        default="", repr=False, metadata={"why": "empty means AZURE_* in the environment, or identity", "secret": True}
    )
    azure_endpoint: str = field(
        default="", metadata={"why": "another endpoint than https://ACCOUNT.blob.core.windows.net"}
    )

    def __post_init__(self) -> None:
        check(self.part_bytes >= 5 * MIB, "part_bytes must be at least 5 MiB, the smallest part S3 takes")
        check(self.request_timeout_s > 0, "request_timeout_s must be positive")
        check(self.s3_checksum in S3_CHECKSUMS, f"s3_checksum must be one of {', '.join(S3_CHECKSUMS)}")
        check(
            bool(self.s3_access_key_id) == bool(self.s3_secret_access_key),
            "s3_access_key_id and s3_secret_access_key must be given together",
        )

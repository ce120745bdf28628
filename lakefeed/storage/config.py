"""Settings of object storage. Standard library only: Spark clusters import it."""

from __future__ import annotations

from dataclasses import dataclass

from lakefeed.settings import MIB, Settings, check, setting

S3_CHECKSUMS = ("crc32", "md5", "none")
S3_SCHEMES = ("s3://", "s3a://", "s3n://")
# Google Cloud Storage and Azure.
CLOUD_SCHEMES = ("gs://", "abfss://", "abfs://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig(Settings):
    """The warehouse and its object store. Empty credentials come from the usual chain of each cloud."""

    warehouse: str = setting(
        "",
        "Location of tables: `s3://bucket/path`, `gs://`, `abfss://` (see storage.md) or a local directory. Empty means"
        " `warehouse` inside the data directory.",
    )
    part_bytes: int = setting(
        8 * MIB,
        "Part size of multipart uploads, in bytes. Larger objects are uploaded in parts; S3 takes none below 5 MiB.",
        minimum=5 * MIB,
    )
    request_timeout_s: float = setting(60.0, "Time limit of one attempt of a storage request, in seconds.", above=0)
    s3_endpoint: str = setting("", "Endpoint of R2, MinIO or SeaweedFS. Empty means AWS.")
    s3_region: str = setting("us-east-1", "Region that requests are signed for. R2 takes `auto`.")
    s3_path_style: bool = setting(
        False, "Put the bucket into the path, not the host name. Most stores besides AWS need it."
    )
    s3_checksum: str = setting(
        "crc32",
        "Checksum that the store compares with every uploaded body. Older stores need `md5`.",
        choices=S3_CHECKSUMS,
    )
    s3_profile: str = setting("", "Profile of the AWS configuration files to take keys from.")
    s3_access_key_id: str = setting("", "Access key. Empty means the AWS credential chain.")
    s3_secret_access_key: str = setting("", "Secret key. Empty means the AWS credential chain.", secret=True)
    s3_session_token: str = setting("", "Token of temporary keys. They are not renewed.", secret=True)
    gcs_service_account: str = setting("", "Path of a key file. Empty means Google's application default credentials.")
    gcs_endpoint: str = setting("", "Endpoint for private access to Google Cloud Storage. Empty means Google's own.")
    azure_account_key: str = setting(
        "", "Account key. Empty means `AZURE_*` variables or a managed identity.", secret=True
    )
    azure_endpoint: str = setting("", "Endpoint. Empty means `https://ACCOUNT.blob.core.windows.net`.")

    def check(self) -> None:
        """Check that keys are complete."""
        check(
            bool(self.s3_access_key_id) == bool(self.s3_secret_access_key),
            "s3_access_key_id and s3_secret_access_key must be given together",
        )

"""Google Cloud Storage for the tests, as far as it is like S3: its XML API, on the S3 server.

Requests for objects and their parts are the same in both, so the client's own requests for Google meet a real server.
What is Google's alone is not there: its tokens (a proxy signs for the S3 server instead) and its checks. Of three
emulators that were tried (docs/storage.md) none takes uploads in parts by the XML API.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lakefeed.storage.config import StorageConfig
from tests.fault_proxy import FaultProxy, fault_proxy
from tests.s3_server import S3Server

_SIGNATURE_LASTS_S = 300
# What stands in a path as it is, for S3's signatures; Google's client writes more of it in percent signs.
_PLAIN = "/-_.~"


@dataclass(frozen=True, slots=True)
class GcsServer:
    """A running server; each test makes itself a bucket. The key file says that no token is to be asked for."""

    proxy: FaultProxy
    key_file: Path
    behind: S3Server

    @property
    def endpoint(self) -> str:
        return self.proxy.url

    def storage(self, warehouse: str, **settings: object) -> StorageConfig:
        """Return the settings of a warehouse on this server."""
        keys = {"gcs_endpoint": self.endpoint, "gcs_service_account": str(self.key_file)}
        return StorageConfig(warehouse=warehouse, **{**keys, **settings})

    def create_bucket(self) -> str:
        """Create a bucket with a name of its own."""
        return self.behind.create_bucket()

    def names(self, bucket: str) -> list[str]:
        """Name all objects."""
        return self.behind.keys(bucket)


@contextlib.contextmanager
def run_gcs_server(directory: Path, behind: S3Server) -> Iterator[GcsServer]:
    """Put the proxy in front of the S3 server."""
    credentials = Credentials(behind.access_key_id, behind.secret_access_key)

    def sign(method: str, url: str) -> str:
        parts = urllib.parse.urlsplit(url)
        path = urllib.parse.quote(urllib.parse.unquote(parts.path), safe=_PLAIN)
        request = AWSRequest(method, parts._replace(path=path).geturl())
        S3SigV4QueryAuth(credentials, "s3", behind.region, _SIGNATURE_LASTS_S).add_auth(request)
        return request.url

    with fault_proxy(behind.endpoint, sign=sign) as proxy:
        key_file = directory / "key.json"
        nothing = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        key_file.write_text(json.dumps({**nothing, "gcs_base_url": proxy.url, "disable_oauth": True}))
        yield GcsServer(proxy, key_file, behind)

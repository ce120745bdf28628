"""Errors of the pipeline, by what the caller does next."""

from __future__ import annotations

from lakefeed.contract.errors import LakefeedError


class PipelineError(LakefeedError):
    """Base of the pipeline's errors."""


class SparkUnavailable(PipelineError):
    """Spark cannot start on this machine: the user has to install what the message names."""


class SparkFailed(PipelineError):
    """Spark rejected a statement or failed while running it; the message is Spark's own, without Java frames."""


class CatalogCheckFailed(PipelineError):
    """The catalog does not answer or rejects the request: the user has to start it, or to set its address and token."""

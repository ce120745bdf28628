"""Errors of the pipeline, by what the caller does next."""

from __future__ import annotations

from lakefeed.contract.errors import LakefeedError


class PipelineError(LakefeedError):
    """Base of the pipeline's errors."""


class SparkUnavailable(PipelineError):
    """Spark cannot start on this machine: a person has to install what the message names."""


class SparkFailed(PipelineError):
    """Spark refused a statement or failed in it; the message is Spark's own, without its Java frames."""


class CatalogUnavailable(PipelineError):
    """The catalog does not answer, or not to us: a person has to start it, or to give its address and token."""

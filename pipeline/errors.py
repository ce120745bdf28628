"""Errors of the pipeline, by what the caller does next."""

from __future__ import annotations


class PipelineError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(PipelineError):
    """A setting is unknown or cannot work: whoever wrote it has to change it."""


class SparkUnavailable(PipelineError):
    """Spark cannot start on this machine: a person has to install what the message names."""


class CatalogUnavailable(PipelineError):
    """The catalog does not answer, or not to us: a person has to start it, or to give its address and token."""


class ConsumerError(PipelineError):
    """A consumer cannot be registered as it was asked for."""

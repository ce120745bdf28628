"""Errors of the pipeline, by what the caller does next."""

from __future__ import annotations


class PipelineError(Exception):
    """Base of all errors that this package raises on purpose."""


class SparkUnavailable(PipelineError):
    """Spark cannot start on this machine: a person has to install what the message names."""

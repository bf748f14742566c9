"""Batch jobs: render a `BatchJob` at a site as a script, and submit it."""

from .job import Array, BatchJob, Preemption
from .render import render
from .schedulers import SCHEDULERS, BatchSystem, submit
from .site import SiteProfile, read_site, site_names

__all__ = [
    "SCHEDULERS", "Array", "BatchJob", "Preemption", "BatchSystem", "SiteProfile", "read_site", "render", "site_names",
    "submit",
]  # fmt: skip

"""Batch jobs: a `Job`, at a site, becomes a script that can be submitted."""

from .job import Array, Job, Preemption
from .render import render
from .schedulers import SCHEDULERS, Scheduler
from .site import SiteProfile, read_site, site_names
from .submit import submit

__all__ = [
    "SCHEDULERS", "Array", "Job", "Preemption", "Scheduler", "SiteProfile", "read_site", "render", "site_names",
    "submit",
]  # fmt: skip

"""The changes to Snakemake fit the installed version."""

from types import SimpleNamespace

import pytest
from snakemake.cli import get_argument_parser
from snakemake.scheduling.job_scheduler import JobRateLimiter, JobScheduler
from snakemake.settings.types import MaxJobsPerTimespan
from snakemake.workflow import Workflow

from dj2mgm.cli.console import lift_default_job_limit, replace_graph_builder


def test_the_default_limit_of_jobs_is_lifted():
    default = get_argument_parser().get_default("max_jobs_per_timespan")
    scheduler = SimpleNamespace(job_rate_limiter=JobRateLimiter(MaxJobsPerTimespan.parse_choice(str(default))))
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is None
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is None


@pytest.mark.parametrize("limit", ["10/1s", "100/1m"])
def test_a_limit_of_the_user_stays(limit):
    limiter = JobRateLimiter(MaxJobsPerTimespan.parse_choice(limit))
    scheduler = SimpleNamespace(job_rate_limiter=limiter)
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is limiter


def test_snakemake_calls_the_replaced_builder_with_its_own():
    calls = []
    assert callable(Workflow._build_dag) and callable(JobScheduler._schedule_reevalutation), "Snakemake still has them"
    workflow = SimpleNamespace(_build_dag=lambda: calls.append("own"))
    replace_graph_builder(workflow, lambda build: (calls.append("before"), build(), calls.append("after")))
    workflow._build_dag()
    assert calls == ["before", "own", "after"]

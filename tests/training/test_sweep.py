"""What a sweep tells its jobs."""

from longctx import cli
from longctx.training.sweep import varied_keys


def test_the_keys_that_jobs_differ_in_are_named_as_in_a_configuration() -> None:
    words = ["attention.options.kernel=portable,hopper", "lr=0.1,0.2", "seed=3"]
    jobs = cli.jobs(words)
    assert len(jobs) == 4
    assert varied_keys(jobs) == {"attention.options.kernel", "lr"}

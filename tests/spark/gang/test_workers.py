"""The workers that fork members are none that others' jobs run in."""

from typing import Any

import pytest

from tallystick.spark.gang.gang import ENVIRONMENT, in_clean_workers
from tallystick.spark.gang.member import Spec, serve
from tallystick.spark.tasks import Parcel


class Context:
    """Has what `Gang` looks at, and what jobs are started with."""

    def __init__(self) -> None:
        self.environment = {"PYTHONHASHSEED": "0"}
        self.broadcasts: list[object] = []


def test_jobs_of_gangs_have_an_environment_of_their_own_and_all_else_in_common() -> None:
    context: Any = Context()
    same = in_clean_workers(context)
    assert same.environment == {"PYTHONHASHSEED": "0", **ENVIRONMENT}
    assert context.environment == {"PYTHONHASHSEED": "0"}, "others start jobs at the same time"
    assert isinstance(same, Context)
    assert same.broadcasts is context.broadcasts


def test_a_worker_that_has_the_users_objects_forks_nobody() -> None:
    parcel: Parcel[tuple[object, ...]] = Parcel(tuple)
    assert parcel.plan == ()
    with pytest.raises(AssertionError, match="members would share the user's objects"):
        serve(Spec(("127.0.0.1", 1), b"", 1, parcel, 1), (0,))

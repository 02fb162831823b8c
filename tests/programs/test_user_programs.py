"""Programs that users write give the results of one device, in drawn layouts on meshes of one to four ranks."""

from __future__ import annotations

import os

import pytest
from tests.programs import (  # noqa: F401  (they register programs)
    user_indexing,
    user_models,
    user_numerics,
    user_sequences,
    user_training,
)
from tests.programs.user_world import MESHES, PROGRAMS, check

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", PROGRAMS)
def test_user_programs_equal_one_device(name: str) -> None:
    if DEEP:
        cases = [(mesh, seed) for mesh in MESHES for seed in range(4)]
    else:  # other meshes for other programs
        number = list(PROGRAMS).index(name)
        cases = [(MESHES[1 + number % 4], number)]
    for mesh, seed in cases:
        check(PROGRAMS[name], mesh, seed)

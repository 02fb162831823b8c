"""Imports torchtitan on torch's own DTensor."""

import tests.drop_in.torchtitan_runs  # noqa: F401

"""How long Hypothesis looks: the same examples each time, or many new ones under SHARDWISE_DEEP=1."""

import os

from hypothesis import settings

# No deadline: the time of one example says more about the machine than about the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("deep", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("deep" if os.environ.get("SHARDWISE_DEEP") == "1" else "ci")
